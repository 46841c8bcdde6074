"""The server of a cluster with one worker beside the single server and `LLM.generate`: tokens per second, in turns.

All three run for the whole time with as many threads, on the same device; those that are not asked wait. Prompts and
answers are the same.
"""

import argparse
import asyncio
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from serve import Offline
from serve_client import accepts, all_answers

from paceline.bench.workloads.workload import take

TARGET = 0.9  # of the single server's tokens per second
START_TIMEOUT_S = 180.0
SIDES = {"single": ["serve"], "cluster": ["cluster", "up", "--prefill", "0", "--decode", "1"]}


@contextmanager
def running(verb: Sequence[str], options: Sequence[str], log: Path) -> Iterator[int]:
    """The port of a server that is ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "paceline", *verb, *options, "--port", str(port)]
    with log.open("w") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not accepts(port):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-2000:]
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(60)


def server(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    args.num_threads, args.speculative_config = args.threads, {"method": args.spec}
    options = ["--model", args.model, "--device", args.device, "--spec-method", args.spec]
    options += ["--num-threads", str(args.threads), "--num-kv-blocks", str(args.num_kv_blocks)]
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = {
            name: stack.enter_context(running(verb, options, folder / f"{name}.log")) for name, verb in SIDES.items()
        }
        offline = stack.enter_context(closing(Offline(args)))
        for num_streams in args.streams:
            texts = [prompt.text for prompt in take("all", max(4, num_streams))]
            common = {"temperature": 0.0, "max_tokens": args.tokens, "ignore_eos": True}
            bodies = [{"prompt": text} | common for text in texts]
            rows.append(_in_turns(offline, ports, bodies, num_streams, args.rounds))
    return rows, all(row["cluster / single"] >= TARGET for row in rows)


def _in_turns(
    offline: Offline, ports: dict[str, int], bodies: Sequence[dict[str, Any]], num_streams: int, rounds: int
) -> dict[str, Any]:
    """Medians over rounds, the first one untimed; the side that begins changes from round to round."""
    found: dict[str, list[float]] = {name: [] for name in ("offline", *ports)}
    for number in range(rounds + 1):
        for name in sorted(found, reverse=number % 2 == 0):
            rate = _tokens_per_s(offline, ports.get(name), bodies, num_streams)
            if number:
                found[name].append(rate)
    medians = {f"{name} tok/s": statistics.median(rates) for name, rates in found.items()}
    ratios = [mine / theirs for mine, theirs in zip(found["cluster"], found["single"], strict=True)]
    of_offline = [mine / theirs for mine, theirs in zip(found["cluster"], found["offline"], strict=True)]
    return {
        "streams": num_streams,
        **medians,
        "cluster / single": statistics.median(ratios),
        "least": min(ratios),
        "cluster / offline": statistics.median(of_offline),
    }


def _tokens_per_s(offline: Offline, port: int | None, bodies: Sequence[dict[str, Any]], num_streams: int) -> float:
    """Through the server at a port, or without one."""
    if port is not None:
        return asyncio.run(all_answers(port, bodies, num_streams))[0]
    done = offline.generate(bodies, together=num_streams > 1)
    return float(done["num_tokens"] / done["seconds"])
