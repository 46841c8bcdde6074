"""What can only be checked once the model is known: token ids against its vocabulary."""

from collections.abc import Iterable

from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise for an option that names a token the model does not have, or that leaves nothing to sample."""
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        if params.min_tokens > 0 and set(params.allowed_token_ids) <= set(params.stop_token_ids):
            raise InvalidOptionError(
                f"allowed_token_ids {list(params.allowed_token_ids)} holds only stop tokens, and min_tokens "
                f"{params.min_tokens} holds those back: nothing could be sampled. Allow another token"
            )
    for processor in params.logits_processors:
        if not callable(processor):
            raise InvalidOptionError(
                f"logits_processors must be callables (token_ids, logits) -> logits, got {processor!r}"
            )


def _check_ids(option: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise InvalidOptionError(f"{option} must hold token ids (whole numbers), got {token!r}")
        if not 0 <= token < vocab_size:
            raise InvalidOptionError(
                f"{option} names token {token}, outside the model's vocabulary of {vocab_size} (0..{vocab_size - 1})"
            )
