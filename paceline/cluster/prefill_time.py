"""How long a worker needs for a prompt, and how much longer its streams then wait for their tokens.

While streams decode, a pass takes only as many prompt rows as `max_token_delay_s` allows, so a prompt is slower there
and the streams are slower too: both are read from the measured pass cost. `prompt_s` is for one worker, `prompts_s` for
all workers at once, one array entry each, as a router asks; they give the same numbers.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.cluster.worker_spec import WorkerSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# As in engine/scheduler.py:
LEAST_ROWS = 4  # of a prompt in a pass, whatever they take
SOLO_DELAYS = 8  # where no stream decodes, a pass may take so many times `max_token_delay_s`
CONTEXT_UNIT = 1000  # tokens that `WorkerSpec.context_s` is for


class PromptTime(NamedTuple):
    seconds: float  # until the prompt is computed
    delay_s: float  # that each running stream has its next tokens later


class PromptTimes(NamedTuple):
    seconds: Floats
    delay_s: Floats


class PrefillTime:
    """Tables by the number of streams that decode, 0 to `max_num_seqs`, made once."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        curve = spec.pass_cost
        most = spec.max_num_seqs * spec.rows_per_stream + spec.max_num_batched_tokens + 1
        self._pass_s: Floats = np.array([curve(rows) for rows in range(most)])
        self._pass_list: list[float] = self._pass_s.tolist()
        streams = np.arange(spec.max_num_seqs + 1) * spec.rows_per_stream
        self._streams_s: Floats = streams * np.float64(spec.stream_row_s)
        self._streams_list: list[float] = self._streams_s.tolist()
        self._base_s: Floats = np.where(streams > 0, self._pass_s[streams] + self._streams_s, 0.0)
        self._base_list: list[float] = self._base_s.tolist()
        self._rows_list = [self._chunk(int(rows)) for rows in streams]
        self._rows: Ints = np.array(self._rows_list, np.int64)
        self._chunk_s: Floats = self._pass_s[streams + self._rows] + self._streams_s

    def _chunk(self, decode_rows: int) -> int:
        """Prompt rows of a pass in which so many rows decode."""
        most, limit_s = self.spec.max_num_batched_tokens, self.spec.max_token_delay_s
        if limit_s is None:
            return most
        rows = np.arange(1, most + 1)
        # The engine's price of a row is a pass's time shared out among all its rows (engine/row_cost.py).
        pass_s = self._pass_s[decode_rows + rows] + self.spec.stream_row_s * decode_rows
        price_s = rows * pass_s / (decode_rows + rows)
        within = price_s <= (limit_s if decode_rows else limit_s * SOLO_DELAYS)
        return min(most, max(LEAST_ROWS, int(within.sum() if within.all() else np.argmin(within))))

    def chunk_rows(self, num_running: int) -> int:
        return self._rows_list[min(num_running, self.spec.max_num_seqs)]

    def rows_s(self, num_running: int, prompt_rows: int) -> float:
        """Of a pass with so many streams and prompt rows, contexts left out."""
        num_running = min(num_running, self.spec.max_num_seqs)
        return self._pass_list[num_running * self.spec.rows_per_stream + prompt_rows] + self._streams_list[num_running]

    def prompt_s(self, num_tokens: int, num_cached: int = 0, num_running: int = 0) -> PromptTime:
        """For `num_tokens` more prompt tokens after `num_cached` others."""
        num_running = min(num_running, self.spec.max_num_seqs)
        chunk = self._rows_list[num_running]
        full, rest = divmod(num_tokens, chunk)
        seconds = full * self.rows_s(num_running, chunk) + (self.rows_s(num_running, rest) if rest else 0.0)
        seconds += self.spec.context_s * num_tokens * (num_cached + num_tokens / 2) / CONTEXT_UNIT
        if not num_running:
            return PromptTime(seconds, 0.0)
        return PromptTime(seconds, seconds - (full + (rest > 0)) * self._base_list[num_running])

    def prompts_s(self, num_tokens: Ints, num_cached: Ints, num_running: Ints) -> PromptTimes:
        running = np.minimum(num_running, self.spec.max_num_seqs)
        full, rest = np.divmod(num_tokens, self._rows[running])
        has_rest = rest > 0
        rest_s = self._pass_s[running * self.spec.rows_per_stream + rest] + self._streams_s[running]
        seconds = full * self._chunk_s[running] + has_rest * rest_s
        if self.spec.context_s:
            seconds += self.spec.context_s * num_tokens * (num_cached + num_tokens / 2) / CONTEXT_UNIT
        return PromptTimes(seconds, (running > 0) * (seconds - (full + has_rest) * self._base_s[running]))

    def passes_s(self, num_running: Ints) -> Floats:
        """Of passes that only decode, with so many streams (0: nothing runs, no time)."""
        return self._base_s[np.minimum(num_running, self.spec.max_num_seqs)]
