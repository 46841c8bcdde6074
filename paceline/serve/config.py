"""The server's options. Every limit is here, so that what a client may cost is read in one place."""

from dataclasses import dataclass

from paceline.errors import InvalidOptionError

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerConfig:
    model_names: tuple[str, ...]  # what clients may call the model; the first one is shown
    api_keys: tuple[str, ...] = ()  # none: no key is asked for
    max_body_bytes: int = 4 * MIB
    max_prompt_tokens: int | None = None  # None: the context length is the limit
    max_tokens_limit: int | None = None  # the most a request may ask for; None: the context length is the limit
    max_choices: int = 128  # prompts x n of one call
    max_queue_len: int = 256  # sequences that may wait beside the ones that run
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0  # how long open streams may go on after a shutdown was asked for
    cors_origins: tuple[str, ...] = ()  # none: no cross-origin page may read an answer
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise InvalidOptionError("the server needs a model name to answer to: give at least one, not empty")
        for name in ("max_body_bytes", "max_choices", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise InvalidOptionError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("max_prompt_tokens", "max_tokens_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOptionError(f"{name} must be at least 1, or left out; got {value}")
        for name in ("max_queue_len", "drain_timeout_s"):
            if getattr(self, name) < 0:
                raise InvalidOptionError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not all(self.api_keys):
            raise InvalidOptionError("an API key is empty: leave api_keys out to run without keys")
