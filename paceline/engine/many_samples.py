"""Which samples of a call with many of them wait for another pass, so that they do not make it long for others.

Every request of a pass waits for its slowest part. The rows of a prompt or a draft can be shared out (scheduler.py),
but a call with n = 64 that decodes needs 64 rows, and sampling them with all options may take a millisecond each. So
while several calls decode, one sample of each call is in every pass, and the others together take only so long. They
take turns: the sample that waited longest goes first. `sampling_s` is what a request's sampling took when it was last
done.
"""

from collections.abc import Callable, Iterable, Sequence

from paceline.core.request import Request


def samples_to_wait(
    decoding: Sequence[Request],  # in order of arrival
    row_s: Callable[[int], float],  # seconds of one row after so many tokens
    limit_s: float,
) -> set[str]:
    """Ids of the requests that this pass leaves out."""
    extra = _all_but_one_of_each_call(decoding)
    if not extra or len(decoding) - len(extra) == 1:  # a call that is alone delays no other
        return set()
    left_s, waiting = limit_s, set()
    for request in sorted(extra, key=lambda request: -request.num_passes_waited):
        seconds = row_s(request.num_tokens) + request.sampling_s
        if seconds <= left_s:
            left_s -= seconds
        else:
            left_s = 0.0  # no later one may overtake: a cheaper sample would always find room
            waiting.add(request.request_id)
    return waiting


def note_waiting(decoding: Iterable[Request], waiting: set[str]) -> None:
    for request in decoding:
        request.num_passes_waited = request.num_passes_waited + 1 if request.request_id in waiting else 0


def _all_but_one_of_each_call(decoding: Sequence[Request]) -> list[Request]:
    """Without the sample of each call that waited longest, which is in the pass whatever it takes."""
    first: dict[str, Request] = {}
    for request in decoding:
        known = first.get(request.call_id)
        if request.call_id and (known is None or request.num_passes_waited > known.num_passes_waited):
            first[request.call_id] = request
    return [request for request in decoding if request.call_id and first[request.call_id] is not request]
