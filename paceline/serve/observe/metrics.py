"""The server's figures for Prometheus: vLLM's names under our prefix, and what it has no name for.

Latencies are observed here as clients see them. Speculation's counts live in the engine and are read when scraped.
"""

from collections.abc import Mapping
from typing import Any

from paceline.core.outputs import RequestMetrics
from paceline.serve.generate.served_engine import Load
from paceline.serve.observe.latest_steps import Recorder
from paceline.serve.observe.prometheus import LENGTH_BUCKETS, Counter, Family, Histogram

PREFIX = "paceline:"

# (metric, key of spec/statistics.py, help), of a method and of each of its members
_METHOD_COUNTS = (
    ("spec_decode_num_drafts_total", "num_drafts", "drafts verified"),
    ("spec_decode_num_draft_tokens_total", "num_draft_tokens", "draft nodes verified"),
    ("spec_decode_num_accepted_tokens_total", "num_accepted_tokens", "draft nodes accepted"),
    ("spec_decode_num_wasted_tokens_total", "num_wasted_tokens", "draft nodes verified in vain"),
    ("spec_decode_num_steps_total", "num_steps", "target passes of sequences the method drafts for"),
    ("spec_decode_num_emitted_tokens_total", "num_emitted_tokens", "tokens these passes emitted, bonus counted"),
    ("spec_decode_draft_seconds_total", "draft_s", "host time spent drafting"),
)
_MEMBER_COUNTS = (
    ("spec_decode_member_num_draft_tokens_total", "num_draft_tokens", "draft nodes verified, by member"),
    ("spec_decode_member_num_accepted_tokens_total", "num_accepted_tokens", "draft nodes accepted, by member"),
)

DRAFTING = ("pays", "probe")  # reasons for which something is offered


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

    def finish(self, metrics: RequestMetrics) -> None:
        """A request is done; its tokens were counted while it ran."""
        self.cached_tokens.inc(metrics.num_cached_tokens)
        self.prompt_len.observe(metrics.num_prompt_tokens)
        self.output_len.observe(metrics.num_output_tokens)
        for histogram, value in (
            (self.e2e, metrics.e2e_s),
            (self.queue, metrics.queue_s),
            (self.per_token, metrics.tpot_s),
        ):
            if value is not None:
                histogram.observe(value)

    def families(self, load: Load, speculation: Mapping[str, Any], recorder: Recorder) -> list[Family]:
        own = [value.family() for value in vars(self).values()]
        return [*_load_families(load), *own, *_speculation_families(speculation), _saved_family(recorder)]


def _load_families(load: Load) -> list[Family]:
    rows = (
        ("num_requests_running", load.num_running, "sequences in the batch"),
        ("num_requests_waiting", load.num_waiting, "sequences in the queue"),
        ("kv_cache_usage_perc", load.kv_usage, "share of KV blocks in use, 0 to 1"),
    )
    families = [Family(PREFIX + name, "gauge", help) for name, _, help in rows]
    for family, (_, value, _) in zip(families, rows, strict=True):
        family.add(value)
    return families


def _speculation_families(speculation: Mapping[str, Any]) -> list[Family]:
    families = []
    for name, key, help in _METHOD_COUNTS:
        family = Family(PREFIX + name, "counter", help)
        for method, stats in speculation.items():
            family.add(stats[key], method=method)
        families.append(family)
    for name, key, help in _MEMBER_COUNTS:
        family = Family(PREFIX + name, "counter", help)
        for method, stats in speculation.items():
            for member, counts in stats["by_member"].items():
                family.add(counts[key], method=method, member=member)
        families.append(family)
    positions = Family(PREFIX + "spec_decode_num_accepted_tokens_per_pos_total", "counter", "accepted, by depth")
    length = Family(PREFIX + "spec_decode_mean_acceptance_length", "gauge", "tokens per target pass since the start")
    for method, stats in speculation.items():
        for position, count in enumerate(stats["accepted_per_position"]):
            positions.add(count, method=method, position=str(position))
        length.add(stats["mean_acceptance_length"], method=method)
    return [*families, positions, length, *_decision_families(speculation)]


def _decision_families(speculation: Mapping[str, Any]) -> list[Family]:
    """What a method that decides for itself decided, and why (spec/auto/controller.py)."""
    steps = Family(PREFIX + "spec_decode_decisions_total", "counter", "steps, by what was decided and why")
    nodes = Family(PREFIX + "spec_decode_decision_nodes_total", "counter", "draft nodes, drafted and offered")
    asked = Family(PREFIX + "spec_decode_member_asked_total", "counter", "steps in which a member was asked")
    awake = Family(PREFIX + "spec_decode_member_awake", "gauge", "1: the member is asked now, by its state")
    own = Family(PREFIX + "spec_decode_decision_seconds_total", "counter", "time spent deciding")
    for method, stats in speculation.items():
        made = stats.get("decisions")
        if made is None:
            continue
        for reason, count in made["reasons"].items():
            steps.add(count, method=method, decision="draft" if reason in DRAFTING else "plain", reason=reason)
        for kind in ("drafted", "offered"):
            nodes.add(made[f"{kind}_nodes"], method=method, kind=kind)
        for member, figures in made["members"].items():
            asked.add(figures["num_asked"], method=method, member=member)
            awake.add(int(figures["asked"]), method=method, member=member, state=figures["state"])
        own.add(made["own_s"], method=method)
    return [steps, nodes, asked, awake, own]


def _saved_family(recorder: Recorder) -> Family:
    family = Family(PREFIX + "spec_decode_time_saved_seconds", "gauge", "estimate; negative: speculation lost time")
    for method, saved in list(recorder.saved.items()):
        family.add(saved.seconds, method=method)
    return family
