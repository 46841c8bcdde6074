"""The server beside the offline engine, then under a crowd, then told to stop: one command, on loopback only.

    python benchmarks/serve.py [--model smollm2-135m] [--seconds 300] [--streams 64] [--workload all]

1. Cost: the same prompts through `LLM.generate` and through the server, in turns, at 1 and at 32 streams.
2. Crowd: clients that read, read slowly, hang up, or send bad and oversized bodies. Every stream that is read to the
   end must be the text that the offline engine gives for its prompt, seed and length.
3. Shutdown: SIGTERM with all streams open. Each must end with its finish or an error, and every KV block come back.

Prints a table, then one JSON line. The exit code is 1 where a target was missed.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from serve_client import Answer, accepts, all_answers, refused, stream

from paceline.bench.run.provenance import provenance
from paceline.bench.run.summary import percentiles
from paceline.bench.workloads.workload import take

MAX_COST = 0.10  # share of the offline tokens/s that the server may take
LENGTHS = (16, 32, 64)  # max_tokens of the crowd's requests
MAX_GROWTH = 0.03  # of the resident memory after the first fifth of the crowd's time
VERB = "import argparse,sys;from paceline.cli import serve as s;p=argparse.ArgumentParser();s.add_arguments(p);sys.exit(s.run(p.parse_args()))"  # fmt: skip  # noqa: E501


class Offline:
    """`LLM` in a process of its own, so that no role borrows another's memory or interpreter lock."""

    def __init__(self, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--role", "offline", *engine_arguments(args)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()  # it says that it is ready

    def generate(self, requests: Sequence[dict[str, Any]], *, together: bool) -> dict[str, Any]:
        """Texts, number of tokens and seconds of these requests, in one batch or one after the other."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"requests": list(requests), "together": together}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the offline engine ended"
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def offline_role(args: argparse.Namespace) -> None:
    from paceline import LLM, SamplingParams

    options = {"device": args.device, "num_threads": args.num_threads, "num_kv_blocks": args.num_kv_blocks}
    llm = LLM(args.model, args.speculative_config, **options)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [request.pop("prompt") for request in job["requests"]]
        params = [SamplingParams(**request) for request in job["requests"]]
        begin_s = time.perf_counter()
        if job["together"]:
            outputs = llm.generate(prompts, params)
        else:
            outputs = [llm.generate(p, s)[0] for p, s in zip(prompts, params, strict=True)]
        seconds = time.perf_counter() - begin_s
        done = [output.outputs[0] for output in outputs]
        num_tokens = sum(len(output.token_ids) for output in done)
        answer = {"texts": [output.text for output in done], "num_tokens": num_tokens, "seconds": seconds}
        print(json.dumps(answer), flush=True)


class Server:
    def __init__(self, args: argparse.Namespace, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._log = log
        command = [
            sys.executable,
            "-c",
            VERB,
            "--port",
            str(self.port),
            *engine_arguments(args),
            "--drain-timeout",
            "5",
        ]
        with log.open("w") as sink:
            self.process = subprocess.Popen(command, stderr=sink)
        deadline = time.monotonic() + 180
        while not accepts(self.port):
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096

    def last_log_line(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self._log.read_text().splitlines()[-1])
        return line


def engine_arguments(args: argparse.Namespace) -> list[str]:
    given = ["--model", args.model, "--device", args.device, "--num-kv-blocks", str(args.num_kv_blocks)]
    if args.num_threads:
        given += ["--num-threads", str(args.num_threads)]
    if args.speculative_config:
        given += ["--speculative-config", json.dumps(args.speculative_config)]
    return given


async def cost(args: argparse.Namespace, offline: Offline, port: int, num_streams: int) -> dict[str, Any]:
    """Tokens per second of both sides, in turns; the ratio is the median over rounds."""
    count = max(num_streams, args.min_requests)
    prompts = [prompt.text for prompt in take(args.workload, count)]
    requests = [{"prompt": text, "temperature": 0.0, "max_tokens": args.tokens, "ignore_eos": True} for text in prompts]

    rounds, measured = [], []
    for number in range(args.rounds + 1):
        alone = await asyncio.to_thread(offline.generate, requests, together=num_streams > 1)
        served, answers = await all_answers(port, requests, num_streams)
        if number:  # the first one warms caches and pages
            rounds.append((alone["num_tokens"] / alone["seconds"], served))
            measured += answers
    return {
        "streams": num_streams,
        "offline_tok_s": statistics.median(alone for alone, _ in rounds),
        "server_tok_s": statistics.median(served for _, served in rounds),
        "ratio": statistics.median(served / alone for alone, served in rounds),
        "ttft_s": percentiles([answer.ttft_s for answer in measured]),
        "gap_s": percentiles([gap for answer in measured for gap in answer.gaps_s]),
    }


class Crowd:
    """Random clients until time is up, each outcome checked."""

    def __init__(self, port: int, requests: Sequence[dict[str, Any]], truths: Sequence[str], seed: int) -> None:
        self._port = port
        self._known = list(zip(requests, truths, strict=True))
        self._rng = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.answers: list[Answer] = []

    async def client(self, deadline_s: float) -> None:
        while time.perf_counter() < deadline_s:
            kind = self._rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
            try:
                outcome = await KINDS[kind][1](self)
            except OSError as error:
                outcome = f"connection error {type(error).__name__}"
                self.wrong.append(f"{kind}: {error}")
            self.outcomes[f"{kind}: {outcome}"] += 1

    async def read(self, pause_s: float = 0.0) -> str:
        request, truth = self._rng.choice(self._known)
        answer = await stream(self._port, request, pause_s=pause_s)
        if answer.status == 429:
            return "told to come back"
        if answer.text != truth or answer.ended not in ("length", "stop"):
            self.wrong.append(f"{answer.status} {answer.ended}: {answer.text!r} is not {truth!r}")
            return "WRONG"
        if not pause_s:
            self.answers.append(answer)
        return "right"

    async def read_slowly(self) -> str:
        return await self.read(pause_s=0.05)

    async def hang_up(self) -> str:
        request, truth = self._rng.choice(self._known)
        answer = await stream(self._port, request, hang_up_after=self._rng.randrange(8))
        if not truth.startswith(answer.text):
            self.wrong.append(f"{answer.text!r} does not begin {truth!r}")
            return "WRONG"
        return "gone"

    async def leave_at_once(self) -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        writer.close()
        return "gone"

    def refusal(self, raw: bytes, expected: int) -> Any:
        async def send() -> str:
            status = await refused(self._port, raw)
            if status != expected:
                self.wrong.append(f"a body that must get {expected} got {status}")
                return "WRONG"
            return f"refused with {status}"

        return send()


KINDS: dict[str, tuple[int, Callable[[Crowd], Any]]] = {
    "read": (70, Crowd.read),
    "read slowly": (3, Crowd.read_slowly),
    "hang up": (12, Crowd.hang_up),
    "leave at once": (3, Crowd.leave_at_once),
    "no JSON": (4, lambda crowd: crowd.refusal(b"{nonsense", 400)),
    "bad option": (4, lambda crowd: crowd.refusal(b'{"prompt": "x", "temperature": -1}', 400)),
    "long prompt": (3, lambda crowd: crowd.refusal(json.dumps({"prompt": "word " * 50_000}).encode(), 400)),
    "large body": (1, lambda crowd: crowd.refusal(b" " * (5 << 20), 413)),
}


async def crowd(args: argparse.Namespace, offline: Offline, server: Server) -> dict[str, Any]:
    requests: list[dict[str, Any]] = []
    for number, prompt in enumerate(take(args.workload, args.prompts)):
        sampled = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}
        requests += [{"prompt": prompt.text[:2000], "max_tokens": length, **sampled} for length in LENGTHS]
    truths = offline.generate(requests, together=True)["texts"]
    clients = Crowd(server.port, requests, truths, args.seed)
    begin_s = time.perf_counter()
    deadline_s = begin_s + args.seconds
    tasks = [asyncio.create_task(clients.client(deadline_s)) for _ in range(args.streams)]
    memory: list[tuple[float, int]] = []
    while not all(task.done() for task in tasks):
        memory.append((time.perf_counter() - begin_s, server.rss_bytes()))
        await asyncio.sleep(min(1.0, args.seconds / 20))
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - begin_s
    settled = [rss for at_s, rss in memory if at_s >= args.seconds / 5] or [memory[-1][1]]
    return {
        "seconds": seconds,
        "requests": sum(clients.outcomes.values()),
        "outcomes": dict(clients.outcomes.most_common()),
        "wrong": clients.wrong[:5],
        "num_wrong": len(clients.wrong),
        "tok_s": sum(answer.num_tokens for answer in clients.answers) / seconds,
        "ttft_s": percentiles([answer.ttft_s for answer in clients.answers]),
        "gap_s": percentiles([gap for answer in clients.answers for gap in answer.gaps_s]),
        "rss_mib": settled[-1] / 2**20,
        "rss_growth": max(settled[len(settled) // 2 :]) / settled[0] - 1,
    }


async def shutdown(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """SIGTERM once every stream has its first token."""
    prompts = [prompt.text[:500] for prompt in take(args.workload, args.streams)]
    first = [asyncio.Event() for _ in prompts]
    tasks = [
        asyncio.create_task(stream(server.port, {"prompt": text, "max_tokens": 1000, "ignore_eos": True}, first=event))
        for text, event in zip(prompts, first, strict=True)
    ]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in first)), 300)
    server.process.send_signal(signal.SIGTERM)
    begin_s = time.perf_counter()
    answers = await asyncio.gather(*tasks)
    code = await asyncio.to_thread(server.process.wait, 60)
    return {
        "streams": len(answers),
        "ended": dict(Counter(answer.ended for answer in answers)),
        "exit_code": code,
        "integrity": server.last_log_line().get("integrity"),
        "seconds": time.perf_counter() - begin_s,
    }


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    log = Path(args.log)
    offline, server = Offline(args), Server(args, log)
    try:
        result: dict[str, Any] = {"cost": []}
        for num_streams in args.cost_streams:
            note(f"cost at {num_streams} streams")
            result["cost"].append(await cost(args, offline, server.port, num_streams))
        note(f"crowd of {args.streams} for {args.seconds} s")
        result["crowd"] = await crowd(args, offline, server)
        note("shutdown under load")
        result["shutdown"] = await shutdown(args, server)
        return result
    finally:
        offline.close()
        if server.process.poll() is None:
            server.process.kill()


def note(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def report(result: dict[str, Any]) -> bool:
    """The table; True where every target was met."""
    checks = []
    for row in result["cost"]:
        checks.append(row["ratio"] >= 1 - MAX_COST)
        speeds = f"offline {row['offline_tok_s']:.1f} tok/s, server {row['server_tok_s']:.1f} tok/s"
        line(f"cost at {row['streams']} streams", f"{speeds}, ratio {row['ratio']:.3f} (>= {1 - MAX_COST})", checks[-1])
        times(row)
    many, end = result["crowd"], result["shutdown"]
    checks.append(many["num_wrong"] == 0)
    line("crowd", f"{many['requests']} requests, {many['tok_s']:.1f} tok/s read, {many['num_wrong']} wrong", checks[-1])
    times(many)
    for outcome, count in many["outcomes"].items():
        print(f"    {count:>7}  {outcome}")
    for example in many["wrong"]:
        print(f"    wrong: {example[:200]}")
    checks.append(many["rss_growth"] <= MAX_GROWTH)
    line("memory", f"{many['rss_mib']:.0f} MiB, grew {many['rss_growth']:+.1%} (<= {MAX_GROWTH:.0%})", checks[-1])
    clean = end["exit_code"] == 0 and end["integrity"] == "clean" and not end["ended"].get("cut")
    checks.append(clean)
    line("shutdown", f"{end['ended']}, exit {end['exit_code']}, integrity {end['integrity']}", clean)
    return all(checks)


def line(what: str, text: str, reached: bool) -> None:
    print(f"{what:<22} {'ok    ' if reached else 'MISSED'} {text}")


def times(row: dict[str, Any]) -> None:
    for name, label in (("ttft_s", "first token"), ("gap_s", "between pieces")):
        if row[name]:
            shown = ", ".join(f"{key} {1000 * row[name][key]:.1f}" for key in ("p50", "p95", "p99"))
            print(f"    {label}: {shown} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculative-config", type=json.loads, metavar="JSON")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--num-kv-blocks", type=int, default=4096)
    parser.add_argument("--workload", default="all", help="of paceline bench, or a JSONL file")
    parser.add_argument("--cost-streams", type=int, nargs="*", default=[1, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="per request where the cost is measured")
    parser.add_argument("--min-requests", type=int, default=4, help="of a round")
    parser.add_argument("--streams", type=int, default=64, help="of the crowd")
    parser.add_argument("--seconds", type=float, default=300, help="of the crowd")
    parser.add_argument("--prompts", type=int, default=16, help="that the crowd sends")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", default="serve-benchmark.log", help="the server's log")
    parser.add_argument("--role", choices=["offline"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "offline":
        offline_role(args)
        return 0
    result = asyncio.run(measure(args))
    reached = report(result)
    print(json.dumps({"result": result, **provenance(vars(args))}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
