"""The server of a cluster with one worker beside the single server: tokens per second at 1 and at 32 streams, in turns.

Both run for the whole time with as many threads; the one that is not asked waits. Prompts and answers are the same.
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
    options = ["--model", args.model, "--spec-method", args.spec, "--num-threads", str(args.threads)]
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = {
            name: stack.enter_context(running(verb, options, folder / f"{name}.log")) for name, verb in SIDES.items()
        }
        for num_streams in (1, 32):
            texts = [prompt.text for prompt in take("all", max(4, num_streams))]
            common = {"temperature": 0.0, "max_tokens": args.tokens, "ignore_eos": True}
            rows.append(asyncio.run(_in_turns(ports, [{"prompt": text} | common for text in texts], num_streams, args)))
    return rows, all(row["ratio"] >= TARGET for row in rows)


async def _in_turns(
    ports: dict[str, int], bodies: Sequence[dict[str, Any]], num_streams: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Medians over rounds, the first one untimed; the side that begins changes from round to round."""
    found: dict[str, list[float]] = {name: [] for name in ports}
    for number in range(args.rounds + 1):
        for name in sorted(ports, reverse=number % 2 == 0):
            rate, _ = await all_answers(ports[name], bodies, num_streams)
            if number:
                found[name].append(rate)
    ratios = [mine / theirs for mine, theirs in zip(found["cluster"], found["single"], strict=True)]
    medians = {f"{name} tok/s": statistics.median(rates) for name, rates in found.items()}
    return {"streams": num_streams, **medians, "ratio": statistics.median(ratios), "least": min(ratios)}
