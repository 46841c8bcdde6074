"""Does the time per token outside the model grow with the answer? One answer of thousands of tokens, decoded plainly.

    python benchmarks/long_answer.py [--model smollm2-135m] [--tokens 4000] [--window 400] [--rounds 3]

The engine alone (`AsyncLLM` with deltas), then the server with a client, in this process, in turns. A window's time
outside the model is its wall time less the seconds of its target passes (`step_seconds["execute"]`). Three windows:

- the first tokens of the answer
- its last tokens
- the first tokens of another answer, whose prompt is as long as all that stood before that last window

The pass itself grows with the context: at 4,000 tokens it takes three times as long, and what Python needs is then out
of the caches each time it runs again, whatever the answer. So the last window is compared with the third: what differs
between them is what grows with the *answer*. Prints microseconds per token, medians of the rounds; the exit code is 1
where the last window takes more than 1.1 times the third.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable

from serve_client import stream

from paceline import AsyncLLM, SamplingParams
from paceline.bench.run.provenance import provenance
from paceline.core.outputs import RequestOutputKind
from paceline.serve.config import ServerConfig
from paceline.serve.generate.over_async_llm import OverAsyncLLM
from paceline.serve.http.app import create_app
from paceline.serve.http.server import GracefulServer, server_options

PROMPT = "Tell me everything that you know about the sea."
MAX_RATIO = 1.1
Marks = list[tuple[int, float, float]]  # (tokens so far, wall seconds, seconds of target passes)


def outside_us(marks: Marks, begin: int, end: int) -> float:
    """Microseconds per token outside the model, between two numbers of tokens."""
    first = next(mark for mark in marks if mark[0] >= begin)
    last = next(mark for mark in marks if mark[0] >= end)
    return 1e6 * (last[1] - first[1] - (last[2] - first[2])) / (last[0] - first[0])


async def engine_marks(llm: AsyncLLM, prompt: list[int], tokens: int, execute_s: Callable[[], float]) -> Marks:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    marks, known = [], 0
    async for output in llm.generate({"prompt_token_ids": prompt}, params, output_kind=RequestOutputKind.DELTA):
        known += len(output.outputs[0].token_ids)
        marks.append((known, time.perf_counter(), execute_s()))
    return marks


async def server_marks(port: int, prompt: list[int], tokens: int, passes: list[tuple[float, float]]) -> Marks:
    marks: Marks = []
    body = {"prompt": prompt, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    passes.clear()
    answer = await stream(port, body)
    assert answer.ended == "length", answer.ended
    at = 0
    for number, event_s in enumerate(answer.event_s, start=1):  # greedy, plain: an event is a token, text or not
        while at + 1 < len(passes) and passes[at + 1][0] <= event_s:
            at += 1
        marks.append((number, event_s, passes[at][1]))
    return marks


async def measure(args: argparse.Namespace) -> dict[str, list[tuple[float, float, float]]]:
    llm = AsyncLLM(args.model, {"method": "none"}, max_model_len=args.tokens + 128)

    def execute_s() -> float:
        return float(llm.stats()["step_seconds"]["execute"])

    config = ServerConfig((args.model,))
    app = create_app(OverAsyncLLM(llm), config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = GracefulServer(server_options(app, config), app.state.service)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        port, found = listener.getsockname()[1], {"engine": [], "server": []}
        passes: list[tuple[float, float]] = []  # (time, seconds of target passes so far)
        llm.watch(lambda step: passes.append((time.perf_counter(), execute_s())))
        short = llm.get_tokenizer().encode(PROMPT)
        before = args.tokens - args.window - args.window // 4
        for number in range(args.rounds + 1):  # the first is not counted
            long = [token for _ in range(before) for token in short][number : number + before]  # not cached
            for side in found:

                async def marks_of(prompt: list[int], tokens: int, side: str = side) -> Marks:
                    if side == "engine":
                        return await engine_marks(llm, prompt, tokens, execute_s)
                    return await server_marks(port, prompt, tokens, passes)

                answer = await marks_of(short, args.tokens)
                end, skip = answer[-1][0], args.window // 4
                first, last = outside_us(answer, skip, args.window + skip), outside_us(answer, end - args.window, end)
                other = await marks_of(long, args.window + skip)
                alike = outside_us(other, skip, other[-1][0])
                print(f"{side}: {first:.0f} us at first, {last:.0f} at the end, {alike:.0f} as deep", file=sys.stderr)
                if number:
                    found[side].append((first, last, alike))
        server.should_exit = True
        await asyncio.to_thread(thread.join, 60)
    llm.shutdown()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--window", type=int, default=400, help="tokens at the beginning and at the end")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    result, reached = {}, True
    for side, rounds in asyncio.run(measure(args)).items():
        first, last, alike = (statistics.median(times) for times in zip(*rounds, strict=True))
        result[side] = {"first_us": first, "last_us": last, "as_deep_us": alike, "rounds": rounds}
        reached &= last / alike <= MAX_RATIO
        print(
            f"{side:7}  us per token: {first:.0f} at the beginning, {last:.0f} at the end ({last / first:.2f}x), "
            f"{alike:.0f} at the beginning of an answer as deep in its context ({last / alike:.2f}x)"
        )
    print(json.dumps({"result": result, **provenance(), "arguments": vars(args)}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
