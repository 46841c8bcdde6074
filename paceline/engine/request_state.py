"""A request and what the engine keeps beside it, and how new tokens join it."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.faults import request_error
from paceline.core.outputs import RequestMetrics, VerifyResult
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.engine.detokenizer import Detokenizer
from paceline.engine.metrics import RequestTracker
from paceline.errors import InvalidRequestError


@dataclass(slots=True)
class RequestState:
    """Kept until the request's last output is read."""

    request: Request
    detokenizer: Detokenizer
    tracker: RequestTracker
    metrics: RequestMetrics | None = None  # set when the request is finished
    num_resumed_pieces: int = 0  # of its text: they came with the tokens that were delivered before it was resumed

    def take_in(self, result: VerifyResult, draft: DraftTree) -> None:
        """Add the new tokens to the request; one that fails at it ends with what it had before the step."""
        request = self.request
        num_tokens, error = len(request.token_ids), result.error
        if error is None:
            try:
                num_added = self._append(result.token_ids)
                request.token_sources.extend(draft.sources(result.accepted)[:num_added])
                if request.logprobs is not None and result.logprobs is not None:
                    request.logprobs.extend(result.logprobs[:num_added])
            except BaseException as raised:
                error = request_error("turning its tokens into text", raised)
        if error is not None:
            del request.token_ids[num_tokens:]
            request.finish_reason, request.stop_reason, request.error = "error", None, error

    def resume(self) -> None:
        """Take in what an earlier attempt delivered, as if it had just come: text, stop strings and counts are then
        what they were there. Raises where tokens follow one that ends the output."""
        given = self.request.resumed_token_ids
        num_added = self._append(given)
        if num_added < len(given):
            raise InvalidRequestError(
                f"output_token_ids goes on after token {num_added} of {len(given)}, which ends the output "
                f"({self.request.finish_reason}): give the tokens, and the options, of one and the same request"
            )

    def _append(self, new_token_ids: Sequence[int]) -> int:
        """Add the new tokens one by one until something ends the request; return how many were added."""
        request = self.request
        params, stop_token_ids = request.sampling_params, request.stop_token_ids
        num_output, added = request.num_output_tokens, 0
        for token in new_token_ids:
            request.token_ids.append(token)
            added += 1
            # A grammar that has come to its end lets an end token through before min_tokens.
            is_stop_token = token in stop_token_ids and (
                num_output + added > params.min_tokens or request.constraint is not None
            )
            hidden = is_stop_token and not params.include_stop_str_in_output
            stop_string = None if hidden else self.detokenizer.append(token)
            if is_stop_token:
                request.finish_reason = "stop"
                request.stop_reason = None if token in request.eos_token_ids else token
            elif stop_string is not None:
                request.finish_reason, request.stop_reason = "stop", stop_string
            elif num_output + added >= request.max_tokens:
                request.finish_reason = "length"
            if request.finish_reason is not None:
                break
        return added
