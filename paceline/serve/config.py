"""The server's options. Every limit is here, so that what a client may cost is read in one place."""

from dataclasses import dataclass

from paceline.errors import InvalidOptionError

MIB = 1 << 20

_ABOVE_ZERO = (
    "max_body_bytes", "max_header_bytes", "max_connections", "max_connections_per_client", "header_timeout_s",
    "body_timeout_s", "read_timeout_s", "max_choices", "request_timeout_s", "max_rate_per_client",
)  # fmt: skip
_ZERO_OR_MORE = (
    "max_queue_len", "drain_timeout_s", "max_stop_strings", "max_bad_words", "max_logit_bias",
    "max_logprob_entries", "max_draft_nodes",
    "max_stored_responses", "max_stored_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServerConfig:
    model_names: tuple[str, ...]  # what clients may call the model; the first one is shown
    api_keys: tuple[str, ...] = ()  # none: no key is asked for; several: each is a tenant of its own
    admin_keys: tuple[str, ...] = ()  # may do what an API key may, and see all tenants on the live page
    # connections
    max_connections: int = 1000
    max_connections_per_client: int = 256  # a client is an IP address
    max_rate_per_client: float = 100.0  # a second: connections, errors and requests that generate nothing; more wait
    max_header_bytes: int = 32 << 10  # of one request, its first line included
    header_timeout_s: float = 10.0  # from the connection, or the request's first byte, to the end of its headers
    max_body_bytes: int = MIB
    body_timeout_s: float = 30.0  # for the whole body
    read_timeout_s: float = 60.0  # a reader that takes nothing for so long is cut off
    # of one call
    max_prompt_tokens: int | None = None  # None: the context length is the limit
    max_tokens_limit: int | None = None  # the most a request may ask for; None: the context length is the limit
    max_choices: int = 128  # prompts x n
    max_stop_strings: int = 64
    max_bad_words: int = 256
    max_logit_bias: int = 1024
    max_logprob_entries: int = 50_000  # choices x tokens x (top log-probabilities + 1), echoed prompts included
    max_draft_nodes: int = 512  # choices x the nodes of one choice's draft, where a call asks for a size
    # tools
    tool_call_parser: str | None = None  # how the model writes calls (serve/tools/families.py); None: by its template
    # stored answers of /v1/responses, for each tenant; the ones not used for longest are forgotten
    max_stored_responses: int = 256
    max_stored_bytes: int = 16 * MIB
    # load
    max_queue_len: int = 256  # sequences that may wait beside the ones that run
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0  # how long open streams may go on after a shutdown was asked for
    cors_origins: tuple[str, ...] = ()  # none: no cross-origin page may read an answer
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise InvalidOptionError("the server needs a model name to answer to: give at least one, not empty")
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                raise InvalidOptionError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("max_prompt_tokens", "max_tokens_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidOptionError(f"{name} must be at least 1, or left out; got {value}")
        for name in _ZERO_OR_MORE:
            if not getattr(self, name) >= 0:
                raise InvalidOptionError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if not all(self.api_keys) or not all(self.admin_keys):
            raise InvalidOptionError("an API key is empty: leave api_keys out to run without keys")
        if self.admin_keys and not self.api_keys:
            raise InvalidOptionError("admin_keys only go with api_keys: without those every client may see everything")
