"""What one call may ask for beyond its prompt and length: everything that costs others time or memory has a limit."""

from typing import Any

from paceline.core.sampling_params import SamplingParams
from paceline.serve.config import ServerConfig
from paceline.serve.http.errors import ApiError
from paceline.serve.http.request_bodies import CompletionRequest, GenerationRequest

MAX_OPTION_CHARS = 65_536  # of all stop strings, or all bad words, together


def check_options(body: GenerationRequest, config: ServerConfig) -> None:
    """Before anything is tokenized."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _check_texts("stop", stop, config.max_stop_strings)
    _check_texts("bad_words", body.bad_words or [], config.max_bad_words)
    _check_number("logit_bias", len(body.logit_bias or ()), config.max_logit_bias)
    _check_draft_nodes(body, config)


def check_model(name: str | None, config: ServerConfig) -> str:
    names = config.model_names
    if name is not None and name not in names:
        raise ApiError(
            404,
            f"the model {name!r} is not here: this server has {', '.join(names)}",
            code="model_not_found",
            param="model",
        )
    return name or names[0]


def num_sequences(body: GenerationRequest, config: ServerConfig) -> int:
    """How many sequences a call asks for, before anything is tokenized."""
    total = num_prompts(body) * (body.n or 1)
    if total > config.max_choices:
        raise ApiError(
            400,
            f"prompts x n is {total} and this server takes at most {config.max_choices} in one call: split it",
            code="too_many_choices",
            param="n",
        )
    return total


def num_prompts(body: GenerationRequest) -> int:
    if isinstance(body, CompletionRequest) and isinstance(body.prompt, list) and body.prompt:
        return 1 if isinstance(body.prompt[0], int) else len(body.prompt)
    return 1


def _check_texts(option: str, texts: list[str], most: int) -> None:
    _check_number(option, len(texts), most)
    num_chars = sum(map(len, texts))
    if num_chars > MAX_OPTION_CHARS:
        message = f"{option} has {num_chars} characters, and this server takes at most {MAX_OPTION_CHARS}: shorten it"
        raise ApiError(400, message, code="too_long", param=option)


def _check_number(option: str, number: int, most: int) -> None:
    if number > most:
        message = f"{option} has {number} entries, and this server takes at most {most}: give fewer"
        raise ApiError(400, message, code="too_long", param=option)


def _check_draft_nodes(body: GenerationRequest, config: ServerConfig) -> None:
    """A node is a row of the pass that others wait for. The engine checks each size by itself, here their product."""
    given: dict[str, Any] = body.speculative or {}
    sizes = [given.get(key) for key in ("num_speculative_tokens", "node_budget")]
    num_nodes = max((size for size in sizes if isinstance(size, int)), default=0)
    total = num_nodes * num_prompts(body) * (body.n or 1)
    if total > config.max_draft_nodes:
        raise ApiError(
            400,
            f"this call asks for drafts of {total} nodes (choices x nodes), and this server takes at most "
            f"{config.max_draft_nodes}: ask for smaller drafts, or leave their size to the server",
            code="too_many_draft_nodes",
            param="speculative",
        )


def tokens_within_logprobs(num_choices: int, num_logprobs: int | None, config: ServerConfig) -> int | None:
    """The most tokens of each choice whose log-probabilities the server formats; None: no limit."""
    if num_logprobs is None:
        return None
    return config.max_logprob_entries // (num_choices * (num_logprobs + 1))


def check_logprobs(params: SamplingParams, prompt_lens: list[int], echo: bool, config: ServerConfig) -> None:
    """`echo`: every choice repeats its prompt with its log-probabilities; otherwise they are given once."""
    entries = 0
    if params.logprobs is not None:
        assert params.max_tokens is not None
        entries += len(prompt_lens) * params.n * params.max_tokens * (params.logprobs + 1)
    if params.prompt_logprobs is not None:
        entries += sum(prompt_lens) * (params.prompt_logprobs + 1) * (params.n if echo else 1)
    if entries > config.max_logprob_entries:
        raise ApiError(
            400,
            f"this call asks for up to {entries} log-probabilities (choices x tokens x top), and this server gives at "
            f"most {config.max_logprob_entries}: ask for fewer tokens, choices or top log-probabilities",
            code="too_many_logprobs",
            param="logprobs",
        )
