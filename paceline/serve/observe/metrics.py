"""What the server counts and times itself: vLLM's names under our prefix, and what it has no name for.

Latencies are observed here as clients see them. `exposition.py` writes all of it down.
"""

import time
from typing import Any

from paceline.core.outputs import RequestMetrics
from paceline.core.step_record import StepRecord
from paceline.serve.observe.counts import LENGTH_BUCKETS, Counter, Histogram

PREFIX = "paceline:"


class Metrics:
    def __init__(self) -> None:
        def histogram(name: str, help: str, **options: Any) -> Histogram:
            return Histogram(PREFIX + name, help, **options)

        self.prompt_tokens = Counter(PREFIX + "prompt_tokens_total", "prompt tokens taken in")
        self.cached_tokens = Counter(PREFIX + "prompt_tokens_cached_total", "of these, found in the prefix cache")
        self.generation_tokens = Counter(PREFIX + "generation_tokens_total", "tokens generated")
        self.finished = Counter(PREFIX + "request_success_total", "sequences finished", ("finished_reason",))
        self.ended = Counter(PREFIX + "requests_ended_total", "calls cut short", ("reason",))
        self.http = Counter(PREFIX + "http_requests_total", "HTTP answers", ("path", "status"))
        self.ttft = histogram("time_to_first_token_seconds", "from arrival to the first token")
        self.inter_token = histogram("inter_token_latency_seconds", "between tokens; a step's tokens share its time")
        self.e2e = histogram("e2e_request_latency_seconds", "from arrival to the last token")
        self.queue = histogram("request_queue_time_seconds", "from arrival to the first pass")
        self.per_token = histogram("request_time_per_output_token_seconds", "mean per token after the first")
        self.prompt_len = histogram("request_prompt_tokens", "prompt length", buckets=LENGTH_BUCKETS)
        self.output_len = histogram("request_generation_tokens", "output length", buckets=LENGTH_BUCKETS)
        self.prefix_queries = Counter(PREFIX + "prefix_cache_queries_total", "prompt tokens looked up")
        self.prefix_hits = Counter(PREFIX + "prefix_cache_hits_total", "of these, found")
        self.preemptions = Counter(PREFIX + "num_preemptions_total", "requests computed again for want of KV blocks")
        self.step_tokens = histogram("iteration_tokens_total", "rows of a pass", buckets=LENGTH_BUCKETS)
        self.prefill = histogram("request_prefill_time_seconds", "from the first pass to the first token")
        self.decode = histogram("request_decode_time_seconds", "from the first token to the last")
        self.inference = histogram("request_inference_time_seconds", "from the first pass to the last token")
        self.computed = histogram(
            "request_prefill_kv_computed_tokens", "prompt tokens not found in the cache", buckets=LENGTH_BUCKETS
        )
        self.longest = histogram(
            "request_max_num_generation_tokens", "output length of a choice", buckets=LENGTH_BUCKETS
        )
        self.asked_n = histogram("request_params_n", "n of a call", buckets=(1, 2, 5, 10, 20))
        self.asked_tokens = histogram("request_params_max_tokens", "max_tokens of a call", buckets=LENGTH_BUCKETS)

    def finish(self, metrics: RequestMetrics, n: int = 1, max_tokens: int | None = None) -> None:
        """A request for `n` samples is done; its tokens were counted while it ran."""
        self.cached_tokens.inc(metrics.num_cached_tokens)
        self.prefix_queries.inc(metrics.num_prompt_tokens)
        self.prefix_hits.inc(metrics.num_cached_tokens)
        self.preemptions.inc(metrics.num_preemptions)
        self.prompt_len.observe(metrics.num_prompt_tokens)
        self.output_len.observe(metrics.num_output_tokens)
        self.computed.observe(metrics.num_prompt_tokens - metrics.num_cached_tokens)
        self.longest.observe(metrics.num_output_tokens / n)
        self.asked_n.observe(n)
        if max_tokens is not None:
            self.asked_tokens.observe(max_tokens)
        for histogram, value in (
            (self.e2e, metrics.e2e_s),
            (self.queue, metrics.queue_s),
            (self.per_token, metrics.tpot_s),
            (self.prefill, _between(metrics.queue_s, metrics.ttft_s)),
            (self.decode, _between(metrics.ttft_s, metrics.e2e_s)),
            (self.inference, _between(metrics.queue_s, metrics.e2e_s)),
        ):
            if value is not None:
                histogram.observe(value)

    def observe_step(self, step: StepRecord) -> None:
        """In the engine's thread, which is the only one that writes this."""
        self.step_tokens.observe(sum(record.num_rows for record in step.passes))


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    return None if begin_s is None or end_s is None else end_s - begin_s


class TokenTimes:
    """The latencies of one prompt's tokens, as its client sees them."""

    def __init__(self, metrics: Metrics, arrival_s: float, num_samples: int) -> None:
        self._metrics = metrics
        self._num_samples = num_samples
        self._begun = False
        self._last_s = arrival_s

    def note(self, num_new_tokens: int) -> None:
        if not num_new_tokens:
            return
        now_s = time.perf_counter()
        passed_s, self._last_s = now_s - self._last_s, now_s
        self._metrics.generation_tokens.inc(num_new_tokens)
        if self._begun:  # samples advance side by side: each got its share of the new tokens
            self._metrics.inter_token.observe(passed_s * self._num_samples / num_new_tokens, num_new_tokens)
        else:
            self._metrics.ttft.observe(passed_s)
        self._begun = True
