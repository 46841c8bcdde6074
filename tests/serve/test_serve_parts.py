"""The server's small parts by themselves: metrics text, time saved, tickets, deltas, and what the docs promise."""

import asyncio
import dataclasses
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.serve import LIMITS
from paceline.core.draft_counts import DraftCounts
from paceline.core.outputs import CompletionOutput, RequestMetrics
from paceline.core.step_record import PassRecord, StepRecord
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.serve.config import ServerConfig
from paceline.serve.generate.deltas import Cursor
from paceline.serve.generate.figures import acceptance_histogram
from paceline.serve.http.errors import ApiError
from paceline.serve.http.gate import GONE, SHUTDOWN, Gate
from paceline.serve.observe.counts import Counter, Histogram
from paceline.serve.observe.latest_steps import LatestSteps
from paceline.serve.observe.live import draw
from paceline.serve.observe.saving import Savings
from tests.serve import fake
from tests.serve.conftest import Running

DOCS = Path(__file__).parent.parent.parent / "docs"


def text(families: list[Metric]) -> str:
    return generate_latest(SimpleNamespace(collect=lambda: families)).decode()  # type: ignore[arg-type]


def samples(family: Metric) -> list[tuple[str, dict[str, str], float]]:
    (parsed,) = text_string_to_metric_families(text([family]))
    return [(sample.name, sample.labels, sample.value) for sample in parsed.samples]


def test_histogram_buckets_are_cumulative_and_bounds_inclusive() -> None:
    histogram = Histogram("h", "help", buckets=(1, 2))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    histogram.observe(2.0, times=2)
    assert samples(histogram.family("m")) == [
        ("h_bucket", {"model_name": "m", "le": "1"}, 2),
        ("h_bucket", {"model_name": "m", "le": "2"}, 5),
        ("h_bucket", {"model_name": "m", "le": "+Inf"}, 6),
        ("h_count", {"model_name": "m"}, 6),
        ("h_sum", {"model_name": "m"}, 16),
    ]
    assert histogram.quantile(0.5) == 2 and histogram.quantile(1.0) is None
    assert Histogram("h", "help").quantile(0.5) is None


def test_labels_are_escaped() -> None:
    counter = Counter("c_total", "help", ("name",))
    counter.inc(1, 'a"b\\c\nd')
    line = text([counter.family("m")]).splitlines()[-1]
    assert line == 'c_total{model_name="m",name="a\\"b\\\\c\\nd"} 1.0'


def passed(num_draft: int, num_new: int, request_id: str = "r", method: str = "ngram") -> PassRecord:
    draft = DraftTree.chain(list(range(num_draft))) if num_draft else EMPTY_TREE
    return PassRecord(request_id, method, 1 + num_draft, 0, draft, list(range(num_new - 1)), list(range(num_new)))


def test_time_saved_is_what_plain_steps_would_have_taken() -> None:
    """Steps cost 10 ms and 1 ms a row; a pass of five rows that emits four tokens saves 4 x 11 - 15 ms."""
    savings = Savings()
    for _ in range(1000):
        assert savings.of_step(StepRecord([passed(0, 1)], 0.011)) == {}
        saved = savings.of_step(StepRecord([passed(4, 4)], 0.015))
    assert saved["ngram"] == pytest.approx(4 * 0.011 - 0.015, rel=1e-6)
    lost = savings.of_step(StepRecord([passed(4, 1)], 0.015))
    assert lost["ngram"] == pytest.approx(0.011 - 0.015, rel=1e-6)


def test_time_saved_is_shared_by_rows_in_a_batch_and_prompts_are_left_out() -> None:
    savings = Savings()
    for _ in range(1000):
        savings.of_step(StepRecord([passed(0, 1), passed(0, 1)], 0.012))
        saved = savings.of_step(StepRecord([passed(4, 5, method="a"), passed(1, 2, method="b")], 0.017))
    assert saved["a"] + saved["b"] == pytest.approx(7 / 2 * 0.012 - 0.017, rel=1e-6)
    prompt = PassRecord("p", "ngram", 100, 100, EMPTY_TREE, [], [1])
    assert savings.of_step(StepRecord([prompt, passed(4, 4)], 1.0)) == {}


def test_a_clock_that_does_not_advance_changes_no_estimate() -> None:
    savings = Savings()
    assert savings.of_step(StepRecord([passed(4, 4)], 0.0)) == {}
    savings.of_step(StepRecord([passed(0, 1)], 0.011))
    assert savings.of_step(StepRecord([passed(4, 5)], 0.013))["ngram"] > 0.0


def test_the_recorder_counts_members_only_for_those_it_follows() -> None:
    recorder = LatestSteps()
    counts = recorder.follow("mine")
    tree = DraftTree([1, 2, 3], [-1, 0, 0], members=[("prediction", "ngram"), ("ngram",), ("prediction",)])
    record = PassRecord("mine", "merge", 4, 0, tree, [0, 2], [1, 3, 9])
    record.counts.count(tree, [0, 2], 3)
    other = PassRecord("other", "merge", 4, 0, tree, [], [7])
    other.counts.count(tree, [], 1)
    recorder.observe(StepRecord([record, other], 0.01))
    assert counts == record.counts and counts is not record.counts
    assert {name: member.num_draft_tokens for name, member in counts.by_member.items()} == {"prediction": 2, "ngram": 2}
    assert {name: one.num_accepted_tokens for name, one in counts.by_member.items()} == {"prediction": 2, "ngram": 1}
    recorder.forget("mine")
    recorder.observe(StepRecord([record], 0.01))
    assert counts.num_steps == 1 and counts.by_member["ngram"].num_draft_tokens == 2
    for _ in range(100):
        recorder.observe(StepRecord([record], 0.01))
    assert len(recorder.recent_trees) < 20, "it must not grow"


def test_a_drawn_tree_ends_where_the_output_was_cut() -> None:
    record = PassRecord("r", "ngram", 3, 0, DraftTree.chain(list(b"ab")), [0, 1], list(b"a"))
    drawn = draw(record, fake.ByteTokenizer())
    assert [node["accepted"] for node in drawn["nodes"]] == [True, False] and drawn["then"] == []


def test_histogram_of_acceptance() -> None:
    assert acceptance_histogram(10, [6, 3, 3]) == [4, 3, 0, 3]
    assert acceptance_histogram(4, []) == [4]


def test_cursors_keep_characters_whole_and_skip_no_token() -> None:
    """A step may end inside a character: its tokens come with the text that completes it."""
    data = "aé€b".encode()
    cursor = Cursor(0, fake.ByteTokenizer(), method="ngram")
    pieces = []
    for begin, end in itertools.pairwise((0, 1, 2, 4, len(data))):
        text = data[:end].decode(errors="ignore")[len(data[:begin].decode(errors="ignore")) :]
        new = CompletionOutput(0, text, list(data[begin:end]), token_sources=["draft"] * (end - begin))
        delta = cursor.advance(new)
        assert delta is not None and delta.pieces is not None
        pieces += delta.pieces
    assert [piece.id for piece in pieces] == list(data)
    assert "".join(piece.text for piece in pieces) == "aé€b"
    assert {piece.source for piece in pieces} == {"ngram"}


def test_a_cursor_has_nothing_to_tell_until_there_is_text() -> None:
    cursor = Cursor(0, fake.ByteTokenizer())
    assert cursor.advance(CompletionOutput(0, "", [195])) is None
    delta = cursor.advance(CompletionOutput(0, "é", [169]))
    assert delta is not None and delta.text == "é" and delta.num_new_tokens == 2 and delta.first


@pytest.mark.parametrize("reason", [GONE, SHUTDOWN])
def test_a_ticket_ends_its_work_from_outside(reason: str) -> None:
    async def work() -> None:
        gate = Gate(max_running=1, max_queue_len=0, timeout_s=60)
        with gate.enter(1) as ticket:
            asyncio.get_running_loop().call_later(0.01, ticket.end, reason)
            with pytest.raises(TimeoutError):
                async with ticket.scope():
                    await asyncio.sleep(30)
            assert ticket.ended_by == reason
            ticket.end(SHUTDOWN)  # too late: the first reason stays
            assert ticket.ended_by == reason
        assert gate.num_sequences == 0 and gate.num_requests == 0

    asyncio.run(work())


def test_a_ticket_that_ended_before_its_work_began_lets_none_begin() -> None:
    async def work() -> None:
        gate = Gate(1, 0, 60)
        with gate.enter(1) as ticket:
            gate.end_all()
            with pytest.raises(TimeoutError):
                async with ticket.scope():
                    await asyncio.sleep(30)

    asyncio.run(work())


def test_the_gate_counts_sequences_and_refuses_while_draining() -> None:
    gate = Gate(max_running=2, max_queue_len=2, timeout_s=60)
    with gate.enter(3), gate.enter(1):
        with pytest.raises(ApiError) as full, gate.enter(1):
            pass
        assert full.value.status == 429
    gate.drain()
    with pytest.raises(ApiError) as draining, gate.enter(1):
        pass
    assert draining.value.status == 503


def test_the_dashboard_asks_for_metrics_that_exist(server: Running, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "x"}).raise_for_status()
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    families = set(re.findall(r"^# TYPE (\S+) ", page.text, re.MULTILINE))
    known = families | {f"{name}_bucket" for name in families}
    asked = set(re.findall(r"paceline:\w+", (DOCS / "grafana.json").read_text()))
    assert asked and asked <= known
    for sample in page.text.splitlines():
        assert sample.startswith("#") or re.fullmatch(r"[a-z0-9_:]+\{[^{}]*\} \S+", sample), sample


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_documented_curl_command_works(server: Running) -> None:
    command = re.search(r"```\n(curl .*?)\n```", (DOCS / "server.md").read_text(), re.DOTALL)
    assert command is not None
    shell = command[1].replace("http://127.0.0.1:8000", server.url).replace("curl ", "curl -s --noproxy '*' ", 1)
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=20, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 8, "repetition_penalty": 1.0, "logprobs": None}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "max_completion_tokens": 8},
        ),
    ],
)
def test_bodies_of_vllms_benchmark_client(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    common = {"model": "fake", "temperature": 0.0, "ignore_eos": True, "stream": True}
    answer = http.post(path, json=common | body | {"stream_options": {"include_usage": True}})
    assert answer.status_code == 200
    last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last[6:])["usage"]["completion_tokens"] == 8


def test_metrics_of_a_request_without_times_are_taken_in() -> None:
    from paceline.serve.observe.metrics import Metrics

    metrics = Metrics()
    metrics.finish(RequestMetrics(3, 1, DraftCounts(num_steps=1, num_emitted_tokens=1), None, None, None, None))
    assert metrics.cached_tokens.total() == 1
    assert ("paceline:e2e_request_latency_seconds_count", {"model_name": "m"}, 0) in samples(metrics.e2e.family("m"))


def test_the_docs_name_every_limit_with_its_default() -> None:
    text = (DOCS / "server.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    shown = {32 << 10: "32 KiB", 1 << 20: "1 MiB", 16 << 20: "16 MiB", 50_000: "50,000", None: "the context"}
    defaults = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    for option, (field, _, _) in LIMITS.items():
        if option == "--drain-timeout":
            assert "`--drain-timeout` seconds (30)" in text
            continue
        (row,) = [row for row in rows if f"`{option}`" in row or f"`{option}:" in row]
        default = defaults[field]
        assert shown.get(default, f"{default:g}" if default is not None else "") in row.split("|")[2], option
