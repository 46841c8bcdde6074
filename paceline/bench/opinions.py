"""What the target says after a rejected token, as far as a recording tells.

exactly        this very path was verified and rejected at this place of this answer
the same pair  the last two tokens, elsewhere in this answer (the nearest place) or, if not, in another one
the same token the last token alone, likewise
"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

from paceline.bench.recording import Recorded

Top = list[int]


class Opinions:
    def __init__(self, recorded: Mapping[str, Recorded]) -> None:
        self._recorded = recorded
        self._exact: dict[str, dict[tuple[int, tuple[int, ...]], Top]] = {}
        self._near: dict[str, dict[Hashable, list[tuple[int, Top]]]] = {}  # by pair and by token: (position, top)
        self._anywhere: dict[Hashable, Top] = {}
        for name, one in recorded.items():
            self._exact[name] = {(position, tuple(path)): top for position, path, top in one.rejected}
            near = self._near[name] = defaultdict(list)
            for position, before, token, top in _all_said(one):
                for key in ((before, token), token):
                    near[key].append((position, top))
                    self._anywhere[key] = top

    def after(self, name: str, position: int, path: Sequence[int]) -> Top | None:
        """`path`: tokens from the one that was not output number `position` on."""
        exact = self._exact[name].get((position, tuple(path)))
        if exact is not None:
            return exact
        before = path[-2] if len(path) > 1 else _token_before(self._recorded[name], position)
        near = self._near[name]
        for key in ((before, path[-1]), path[-1]):
            if key in near:
                return min(near[key], key=lambda said: abs(said[0] - position))[1]
            if key in self._anywhere:
                return self._anywhere[key]
        return None


def _all_said(one: Recorded) -> Iterator[tuple[int, int, int, Top]]:
    """(output position, the token before, the token, what the target would say next), rejected or not."""
    for position, path, top in one.rejected:
        yield position, path[-2] if len(path) > 1 else _token_before(one, position), path[-1], top
    for position, token in enumerate(one.output_token_ids[:-1]):
        yield position, _token_before(one, position), token, one.top_token_ids[position + 1]


def _token_before(one: Recorded, position: int) -> int:
    return one.output_token_ids[position - 1] if position else one.prompt_token_ids[-1]
