"""The server's figures as Prometheus' text: its own, and the engine's, which are read when scraped."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.core.step_record import Load
from paceline.serve.generate.service import Service
from paceline.serve.observe.counts import MODEL
from paceline.serve.observe.latest_steps import LatestSteps
from paceline.serve.observe.metrics import PREFIX

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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


class Exposition(Collector):
    """One per server: it has a registry of its own, so that nothing else in the process is told."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._model = service.config.model_names[0]
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """What there is depends on what runs: nothing is announced."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        service, model = self._service, self._model
        yield from _load_families(service.backend.load(), model)
        for value in vars(service.metrics).values():
            yield value.family(model)
        yield from _speculation_families(service.backend.speculation_stats(), model)
        yield _saved_family(service.latest_steps, model)
        yield _cache_family(service.backend.cache_config, model)


def _counter(name: str, help: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, help, labels=(MODEL, *labels))


def _gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, help, labels=(MODEL, *labels))


def _load_families(load: Load, model: str) -> Iterator[Metric]:
    for name, value, help in (
        ("num_requests_running", load.num_running, "sequences in the batch"),
        ("num_requests_waiting", load.num_waiting, "sequences in the queue"),
        ("kv_cache_usage_perc", load.kv_usage, "share of KV blocks in use, 0 to 1"),
    ):
        family = _gauge(name, help)
        family.add_metric((model,), value)
        yield family


def _speculation_families(speculation: Mapping[str, Any], model: str) -> Iterator[Metric]:
    for name, key, help in _METHOD_COUNTS:
        family = _counter(name, help, "method")
        for method, stats in speculation.items():
            family.add_metric((model, method), stats[key])
        yield family
    for name, key, help in _MEMBER_COUNTS:
        family = _counter(name, help, "method", "member")
        for method, stats in speculation.items():
            for member, counts in stats["by_member"].items():
                family.add_metric((model, method, member), counts[key])
        yield family
    positions = _counter("spec_decode_num_accepted_tokens_per_pos_total", "accepted, by depth", "method", "position")
    length = _gauge("spec_decode_mean_acceptance_length", "tokens per target pass since the start", "method")
    for method, stats in speculation.items():
        for position, count in enumerate(stats["accepted_per_position"]):
            positions.add_metric((model, method, str(position)), count)
        length.add_metric((model, method), stats["mean_acceptance_length"])
    yield from (positions, length, *_decision_families(speculation, model))


def _decision_families(speculation: Mapping[str, Any], model: str) -> Sequence[Metric]:
    """What a method that decides for itself decided, and why (spec/auto/controller.py)."""
    steps = _counter(
        "spec_decode_decisions_total", "steps, by what was decided and why", "method", "decision", "reason"
    )
    nodes = _counter("spec_decode_decision_nodes_total", "draft nodes, drafted and offered", "method", "kind")
    asked = _counter("spec_decode_member_asked_total", "steps in which a member was asked", "method", "member")
    in_use = _gauge("spec_decode_member_in_use", "1: the member is in use, by its state", "method", "member", "state")
    gain = _gauge("spec_decode_member_gain_tokens", "tokens that its drafts bring in a step", "method", "member")
    price = _gauge("spec_decode_member_price_tokens", "tokens that the time for them is worth", "method", "member")
    # The words with their numbers, which LLM.stats() and the page have, would be a new series each time.
    why = _gauge("spec_decode_member_reason_info", "1: what decided about it", "method", "member", "reason")
    own = _counter("spec_decode_decision_seconds_total", "time spent deciding", "method")
    for method, stats in speculation.items():
        made = stats.get("decisions")
        if made is None:
            continue
        for reason, count in made["reasons"].items():
            steps.add_metric((model, method, "draft" if reason in DRAFTING else "plain", reason), count)
        for kind in ("drafted", "offered"):
            nodes.add_metric((model, method, kind), made[f"{kind}_nodes"])
        for member, figures in made["members"].items():
            asked.add_metric((model, method, member), figures["num_asked"])
            in_use.add_metric((model, method, member, figures["state"]), int(figures["asked"]))
            gain.add_metric((model, method, member), figures["gain_tokens"])
            price.add_metric((model, method, member), figures["price_tokens"])
            why.add_metric((model, method, member, figures["decided"]), 1)
        own.add_metric((model, method), made["own_s"])
    return steps, nodes, asked, in_use, gain, price, why, own


def _cache_family(config: Mapping[str, str], model: str) -> Metric:
    family = _gauge("cache_config_info", "how the KV cache is set up", *config)
    family.add_metric((model, *config.values()), 1)
    return family


def _saved_family(recorder: LatestSteps, model: str) -> Metric:
    family = _gauge("spec_decode_time_saved_seconds", "estimate; negative: speculation lost time", "method")
    for method, saved in list(recorder.saved.items()):
        family.add_metric((model, method), saved.seconds)
    return family
