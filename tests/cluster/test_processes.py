"""A cluster of processes behind the real HTTP server: kill -9 at random moments, and nothing that a client sees."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("paceline.kv.exchange", reason="the engine's seams are on another branch")

from paceline.cluster.backend import ClusterBackend
from paceline.cluster.local import LocalWorker, LocalWorkers, WorkerStartError
from paceline.core.sampling_params import SamplingParams
from paceline.llm import LLM
from paceline.spec.config.speculative_config import at_default_size
from tests.bench.toy_llm import toy_model
from tests.cluster.toy_worker import METHODS, OPTIONS
from tests.serve.conftest import Running, running

pytestmark = pytest.mark.slow  # each worker loads PyTorch
COMMAND = [sys.executable, "-m", "tests.cluster.toy_worker"]
NUM_REQUESTS = 60


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    roles = ["prefill", "decode", "decode"]
    made = LocalWorkers([LocalWorker(f"{role}-{i}", role, COMMAND) for i, role in enumerate(roles)])
    made.start()
    try:
        yield made
    finally:
        processes = [worker.process for worker in made.workers]
        made.end()
        assert [process.returncode for process in processes if process is not None] == [0, 0, 0]  # KV blocks all back


def prompt(i: int) -> list[int]:
    dice = random.Random(i)
    return [dice.randrange(23) for _ in range(20 + i % 30)]


def body(i: int) -> dict[str, Any]:
    options = {"temperature": 0.0} if i % 2 else {"temperature": 1.2, "seed": i}
    return {"prompt": prompt(i), "max_tokens": 30 + i % 40, "ignore_eos": True, "logprobs": 1, **options}


def ask(server: Running, i: int, gaps: list[float]) -> tuple[str, list[float]]:
    """A streamed request: its text and log-probabilities."""
    text, logprobs, last_s = "", [], time.monotonic()
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json=body(i) | {"model": "fake", "stream": True}) as response,
    ):
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            choice = event["choices"][0]
            text += choice["text"]
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
            gaps.append(time.monotonic() - last_s)
            last_s = time.monotonic()
    return text, logprobs


def test_a_client_sees_nothing_of_workers_that_are_killed(workers: LocalWorkers) -> None:
    llm = LLM(toy_model(), at_default_size({"method": "ngram"}), **OPTIONS)
    expected = []
    for i in range(NUM_REQUESTS):
        options = body(i)
        params = SamplingParams(**{key: value for key, value in options.items() if key != "prompt"})
        sample = llm.generate({"prompt_token_ids": options["prompt"]}, params)[0].outputs[0]
        expected.append((sample.text, [one.logprob for one in sample.token_logprobs or []]))
    backend = ClusterBackend(workers.addresses(), toy_model().tokenizer, policy="remote")
    assert list(backend.methods) == METHODS
    done, gaps = threading.Event(), list[float]()

    def chaos() -> None:
        """One at a time: the next when all are back."""
        dice, turn = random.Random(3), 0
        while not done.wait(dice.uniform(0.05, 0.3)):
            ingress = backend._ingress
            if ingress is not None and all(link.is_up for link in ingress.links):
                process = workers.workers[turn % len(workers.workers)].process
                assert process is not None
                os.kill(process.pid, signal.SIGKILL)
                turn += 1

    with running(backend) as server:  # type: ignore[arg-type]
        assert ask(server, 0, gaps)[0] == expected[0][0]
        breaking = threading.Thread(target=chaos)
        breaking.start()
        try:
            with ThreadPoolExecutor(6) as pool:
                found = list(pool.map(lambda i: ask(server, i, gaps), range(NUM_REQUESTS)))
        finally:
            done.set()
            breaking.join()
        ingress = backend._ingress
        assert ingress is not None and ingress.num_resumed > 0, "no request was hit: the test shows nothing"
    for i in range(NUM_REQUESTS):
        assert found[i][0] == expected[i][0], f"request {i}"
        assert found[i][1] == pytest.approx(expected[i][1], abs=0), f"request {i}"
    print(f"{ingress.num_resumed} resumed, longest gap {max(gaps):.2f} s")


def test_a_worker_that_cannot_start_is_reported_and_leaves_no_other() -> None:
    good = LocalWorker("good", "decode", COMMAND)
    bad = LocalWorker("bad", "decode", [sys.executable, "-c", "raise SystemExit(7)"])
    with pytest.raises(WorkerStartError, match="worker bad ended with code 7"):
        LocalWorkers([good, bad]).start()
    assert good.process is not None and good.process.poll() is not None


def test_a_worker_ends_when_its_parent_is_gone() -> None:
    script = (
        "import sys, time; from paceline.cluster.local import LocalWorker;"
        f"w = LocalWorker('w', 'decode', {COMMAND!r}); w.start(); w.wait_ready();"
        "print(w.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().split()[2] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    raise AssertionError("it goes on without its parent")
