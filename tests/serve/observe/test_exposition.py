"""The text for Prometheus: which metrics there are, by which labels, and that they are this server's own."""

import httpx
import prometheus_client
from prometheus_client.parser import text_string_to_metric_families

from tests.serve import fake
from tests.serve.conftest import Running, running

MODEL, METHOD = {"model_name"}, {"model_name", "method"}
LABELS = {
    "num_requests_running": MODEL,
    "num_requests_waiting": MODEL,
    "kv_cache_usage_perc": MODEL,
    "prompt_tokens_total": MODEL,
    "prompt_tokens_cached_total": MODEL,
    "generation_tokens_total": MODEL,
    "request_success_total": MODEL | {"finished_reason"},
    "requests_ended_total": None,  # no request was cut short
    "http_requests_total": MODEL | {"path", "status"},
    "time_to_first_token_seconds": MODEL,
    "inter_token_latency_seconds": MODEL,
    "e2e_request_latency_seconds": MODEL,
    "request_queue_time_seconds": MODEL,
    "request_time_per_output_token_seconds": MODEL,
    "request_prompt_tokens": MODEL,
    "request_generation_tokens": MODEL,
    "prefix_cache_queries_total": MODEL,
    "prefix_cache_hits_total": MODEL,
    "num_preemptions_total": MODEL,
    "iteration_tokens_total": MODEL,
    "request_prefill_time_seconds": MODEL,
    "request_decode_time_seconds": MODEL,
    "request_inference_time_seconds": MODEL,
    "request_prefill_kv_computed_tokens": MODEL,
    "request_max_num_generation_tokens": MODEL,
    "request_params_n": MODEL,
    "request_params_max_tokens": MODEL,
    "cache_config_info": MODEL | {"block_size"},
    "spec_decode_num_drafts_total": METHOD,
    "spec_decode_num_draft_tokens_total": METHOD,
    "spec_decode_num_accepted_tokens_total": METHOD,
    "spec_decode_num_wasted_tokens_total": METHOD,
    "spec_decode_num_steps_total": METHOD,
    "spec_decode_num_emitted_tokens_total": METHOD,
    "spec_decode_draft_seconds_total": METHOD,
    "spec_decode_member_num_draft_tokens_total": METHOD | {"member"},
    "spec_decode_member_num_accepted_tokens_total": METHOD | {"member"},
    "spec_decode_num_accepted_tokens_per_pos_total": METHOD | {"position"},
    "spec_decode_mean_acceptance_length": METHOD,
    "spec_decode_decisions_total": METHOD | {"decision", "reason"},
    "spec_decode_decision_nodes_total": METHOD | {"kind"},
    "spec_decode_member_asked_total": METHOD | {"member"},
    "spec_decode_member_in_use": METHOD | {"member", "state"},
    "spec_decode_member_gain_tokens": METHOD | {"member"},
    "spec_decode_member_price_tokens": METHOD | {"member"},
    "spec_decode_member_reason_info": METHOD | {"member", "reason"},
    "spec_decode_decision_seconds_total": METHOD,
    "spec_decode_time_saved_seconds": METHOD,
}


def families(http: httpx.Client) -> dict[str, prometheus_client.metrics_core.Metric]:
    found = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name.removeprefix("paceline:")] = family
    return found


def test_the_metrics_and_their_labels(server: Running, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "abc", "n": 2, "max_tokens": 10}).raise_for_status()
    found = families(http)
    assert set(found) == set(LABELS)
    for name, labels in LABELS.items():
        for sample in found[name].samples:
            assert set(sample.labels) - {"le"} == labels, name
        assert bool(found[name].samples) == (labels is not None), name


def test_values_are_what_was_counted() -> None:
    with running(fake.FakeBackend()) as handle, handle.client() as http:
        http.post("/v1/completions", json={"prompt": "abc", "n": 2, "max_tokens": 10}).raise_for_status()
        found = families(http)
    value = {name: family.samples[0].value for name, family in found.items() if family.samples}
    assert value["prompt_tokens_total"] == 3 and value["generation_tokens_total"] == 20
    assert value["request_success_total"] == 2 and value["spec_decode_draft_seconds_total"] == 0.25
    buckets = [sample for sample in found["request_prompt_tokens"].samples if sample.name.endswith("_bucket")]
    assert [(sample.labels["le"], sample.value) for sample in buckets][:4] == [("1", 0), ("2", 0), ("5", 1), ("10", 1)]
    ttft = {sample.name.rsplit("_", 1)[1]: sample.value for sample in found["time_to_first_token_seconds"].samples}
    assert ttft["count"] == 1 and ttft["sum"] > 0


def test_servers_in_one_process_share_nothing(server: Running, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "abc"}).raise_for_status()
    with running(fake.FakeBackend()) as other, other.client() as client:
        text = client.get("/metrics").text
    assert "generation_tokens_total{" not in text
    assert "_created" not in text and "python_" not in text and "process_" not in text
    assert "paceline" not in prometheus_client.generate_latest(prometheus_client.REGISTRY).decode()


# What vLLM 0.24's own Grafana boards query (examples/observability), less the prefix.
VLLM_BOARDS = [
    "e2e_request_latency_seconds",
    "generation_tokens_total",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "kv_cache_usage_perc",
    "num_requests_running",
    "num_requests_waiting",
    "prompt_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_success_total",
    "time_to_first_token_seconds",
]


def test_vllms_grafana_boards_find_all_they_ask_for() -> None:
    assert not set(VLLM_BOARDS) - set(LABELS)


def test_the_times_of_a_request_add_up_and_its_passes_are_counted() -> None:
    with running(fake.FakeBackend()) as handle, handle.client() as http:
        http.post("/v1/completions", json={"prompt": "abcdef", "max_tokens": 9}).raise_for_status()
        found = families(http)

    def total(name: str) -> float:
        return next(sample.value for sample in found[name].samples if sample.name.endswith("_sum"))

    both = total("request_prefill_time_seconds") + total("request_decode_time_seconds")
    assert total("request_inference_time_seconds") > 0 and abs(both - total("request_inference_time_seconds")) < 1e-9
    assert total("request_params_max_tokens") == total("request_max_num_generation_tokens") == 9
    assert total("iteration_tokens_total") == 3 * 4, "three passes of a row and a draft of three"
