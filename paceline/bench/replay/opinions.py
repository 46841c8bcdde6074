"""What the target says after a rejected token, as far as a recording tells.

    exactly         this very path was verified and rejected at this place of this answer
    the same pair   its last two tokens stood earlier in this answer, or were rejected there: the nearest place counts
    the same token  likewise, by the last token alone

Later places are left out: they contain what comes next, and a drafter that learned from them would look too good.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from paceline.bench.replay.recording import Recorded

Top = list[int]
Key = tuple[int, int] | int  # a pair of tokens, or one


class Opinions:
    def __init__(self, recorded: Mapping[str, Recorded]) -> None:
        self._recorded = recorded
        self._exact: dict[str, dict[tuple[int, tuple[int, ...]], Top]] = {}
        self._places: dict[str, dict[Key, list[tuple[int, Top]]]] = {}  # in the order of their positions
        for name, one in recorded.items():
            self._exact[name] = {(position, tuple(path)): top for position, path, top in one.rejected}
            places = self._places[name] = defaultdict(list)
            for position, before, token, top in sorted(_all_said(one), key=lambda said: said[0]):
                places[before, token].append((position, top))
                places[token].append((position, top))

    def after(self, name: str, position: int, path: Sequence[int]) -> Top | None:
        """`path`: tokens from the one that was not output number `position` on."""
        exact = self._exact[name].get((position, tuple(path)))
        if exact is not None:
            return exact
        before = _token_before(self._recorded[name], position, path)
        for key in ((before, path[-1]), path[-1]):
            places = self._places[name].get(key, [])
            found = bisect.bisect_right(places, position, key=lambda said: said[0])
            if found:
                return places[found - 1][1]
        return None


def _all_said(one: Recorded) -> Iterator[tuple[int, int, int, Top]]:
    """(output position, the token before, the token, what the target said next), of tokens rejected and accepted."""
    for position, token in enumerate(one.output_token_ids[:-1]):
        # known once the token is out, so after what was rejected at its place
        yield position + 1, _token_before(one, position, [token]), token, one.top_token_ids[position + 1]
    for position, path, top in one.rejected:
        yield position, _token_before(one, position, path), path[-1], top


def _token_before(one: Recorded, position: int, path: Sequence[int]) -> int:
    """The one before the last of a path that begins at this output position."""
    if len(path) > 1:
        return path[-2]
    return one.output_token_ids[position - 1] if position else one.prompt_token_ids[-1]
