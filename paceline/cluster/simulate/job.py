"""What a simulated worker does for one request."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    request: int
    keys: tuple[int, ...]
    num_prompt_tokens: int  # to be computed, or found in the cache
    num_output_tokens: int  # 0: a prefill worker computes the prompt only
    num_left: int = 0  # prompt tokens without KV, once it is admitted
    num_cached: int = 0
    first_s: float | None = None  # when the first pass with rows of it ended
    num_last: int = 0  # its rows in the latest pass

    @property
    def num_computed(self) -> int:
        return self.num_prompt_tokens - self.num_left

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens
