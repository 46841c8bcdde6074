"""What can only be checked once the model is known: token ids against its vocabulary, and whether any can be chosen."""

from collections.abc import Collection, Iterable

from paceline.core.option_values import shown
from paceline.core.request import ending_token_ids
from paceline.core.sampling_params import SamplingParams
from paceline.errors import InvalidOptionError


def check_sampling(
    params: SamplingParams,
    vocab_size: int,
    eos_token_ids: Iterable[int] = (),
    banned_ids: Collection[int] = (),  # bad words of one token
) -> None:
    """Raise for an option that names a token the model does not have, or that leaves nothing to sample at the start.

    Later on a bad word of several tokens, or a logits processor, may still take the last token away: then the request
    ends with `NothingToSampleError`."""
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    if params.min_tokens > 0:
        held_back = ending_token_ids(params, eos_token_ids)
        if params.allowed_token_ids is not None and held_back.issuperset(params.allowed_token_ids):
            raise InvalidOptionError(
                f"allowed_token_ids {shown(params.allowed_token_ids)} holds only stop tokens, and min_tokens "
                f"{params.min_tokens} holds those back: nothing could be sampled. Allow another token"
            )
        banned_ids = held_back.union(banned_ids)
    is_banned = set(banned_ids)
    allowed = range(vocab_size) if params.allowed_token_ids is None else params.allowed_token_ids
    if len(is_banned) >= len(allowed) and is_banned.issuperset(allowed):
        raise InvalidOptionError(
            f"bad_words and min_tokens {params.min_tokens} forbid every token that may be chosen "
            f"({len(allowed)} allowed): nothing could be sampled. Forbid fewer, or allow another token"
        )


def _check_ids(option: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidOptionError(
                f"{option} names token {shown(token)}, outside the model's vocabulary of {vocab_size} "
                f"(0..{vocab_size - 1})"
            )
