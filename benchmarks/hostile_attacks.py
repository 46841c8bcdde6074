"""The attackers of `benchmarks/hostile.py`: a process of their own, at a lower priority and from another address.

Real attackers have machines and addresses of their own. So their CPU time must not be the server's (hence the
priority), and a limit per client that stops them must not stop the friendly clients (hence 127.0.0.2; Linux only).

The process prepares every body once and says that it is ready. Then each line on stdin,
`{"attack": NAME, "seconds": S}`, runs one attack, and one line on stdout says how the server answered. A new attack is
a new row in ATTACKS.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from hostile_bodies import (
    ANYTHING,
    CONTEXT,
    FORGED,
    FULL_OPTIONS,
    LONG_STREAM,
    MANY_NUMBERS,
    MARKS,
    VOCABULARY,
    WORDS,
    chat,
    deep_json,
    extreme_options,
    extreme_speculation,
    many_digits,
    no_token_left,
    option,
    prompts_of,
)
from hostile_client import (
    CHAT,
    COMPLETIONS,
    HOLDERS,
    Attack,
    Target,
    cancelling,
    churn,
    crawl,
    crawling,
    flood,
    garbage,
    head,
    not_http,
    polling,
    posting,
    unread,
)

ATTACKS: dict[str, Attack] = {
    "endless header line": flood(lambda _: b"GET /health HTTP/1.1\r\nX-Endless: ", b"a" * 65536),
    "endless headers": flood(lambda _: b"GET /health HTTP/1.1\r\n", b"X-One: more\r\n" * 5000),
    "endless body": flood(
        lambda target: head(COMPLETIONS, key=target.key)[:-2] + b"Transfer-Encoding: chunked\r\n\r\n",
        b"10000\r\n" + b" " * 65536 + b"\r\n",
    ),
    "slow headers": crawling(lambda _: b"GET /health HTTP/1.1\r\nX-Slow: ", b"a", 200),
    "silent connections": crawling(lambda _: b"", b"", 300),
    "slow bodies": crawling(lambda target: head(COMPLETIONS, 4000, target.key), b" ", 100),
    "slow bodies, no key": crawling(lambda _: head(COMPLETIONS, 4000), b" ", 100),
    "million integers": posting("abuse", lambda: [MANY_NUMBERS]),
    "4 MB prompt": posting("abuse", lambda: [option(prompt=WORDS), option(prompt=["word"] * 500_000)]),
    "4 MB message": posting("abuse", lambda: [chat(WORDS)], CHAT),
    "4 MB, no key": posting("abuse", lambda: [MANY_NUMBERS, option(prompt=WORDS)], keyed=False),
    "deep JSON": posting("abuse", deep_json),
    "20,000 bad words x 32": posting("abuse", lambda: [option(bad_words=[f"w{n}" for n in range(20_000)], n=32)]),
    "echo, logprobs x 24": posting("abuse", lambda: [option(prompt=[30] * 2000, echo=True, logprobs=100, n=24)]),
    "300,000 stop strings": posting("abuse", lambda: [option(stop=[f"~{n}" for n in range(300_000)], max_tokens=32)]),
    "n=128 with logprobs": posting("load", lambda: [option(n=128, logprobs=20, stream=True)]),
    "bias on every token": posting("abuse", lambda: [option(logit_bias={str(n): 0.5 for n in range(VOCABULARY)}, n=8)]),
    "extreme options": posting("abuse", extreme_options, workers=2, pause_s=0.02),
    "5,000 digits": posting("abuse", many_digits, pause_s=0.05),
    "5,000-digit length": Attack(
        "abuse", lambda target, _: target.repeat(lambda: target.exchange(head(COMPLETIONS, "9" * 5000)), 1, 0.05)
    ),
    "no token left": posting("abuse", no_token_left, pause_s=0.05),
    "garbage requests": Attack("abuse", garbage),
    "connection churn": Attack("abuse", churn),
    "cancelled streams": Attack("load", cancelling, lambda: [LONG_STREAM]),
    "control tokens": posting("load", lambda: [chat(FORGED * 20)], CHAT),
    "4 MB to tokenize": posting("abuse", lambda: [option(prompt=WORDS), {"prompt": WORDS}], "/tokenize"),
    "4 MB to detokenize": posting("abuse", lambda: [{"tokens": [100] * 800_000}], "/detokenize"),
    "polled figures": Attack("abuse", polling),
    "unread answers": Attack("load", unread, lambda: [LONG_STREAM]),
    "not HTTP": Attack("abuse", not_http),
    "combining marks": posting("abuse", lambda: [chat(MARKS), chat("\U0001f468\u200d" * 300_000)], CHAT),
    "4 MB prediction": posting("abuse", lambda: [chat("a", prediction={"type": "content", "content": WORDS})], CHAT),
    "extreme speculation": posting("abuse", extreme_speculation, pause_s=0.02),
    "1 MB prompt": posting("abuse", lambda: [option(prompt=ANYTHING), chat(ANYTHING)]),
    "1 MB of marks": posting("abuse", lambda: [chat(MARKS[:450_000])], CHAT),
    "1 MB to tokenize": posting("abuse", lambda: [{"prompt": ANYTHING}], "/tokenize"),
    "40,000 values": posting("abuse", lambda: [option(prompt=[30] * 40_000), option(prompt=["a"] * 4096)]),
    "40,000 to detokenize": posting("abuse", lambda: [{"tokens": [100] * 40_000}], "/detokenize"),
    "all options at their limits": posting("load", lambda: [option(**FULL_OPTIONS)]),
    "prompts of 2,000": posting("load", prompts_of(2000)),
    "prompts of a context": posting("load", prompts_of(CONTEXT)),
}


class Holders:
    """Slow connections kept through the whole run, since a slice is shorter than a sensible time limit."""

    NUM_EACH = 16

    def __init__(self, target: Target) -> None:
        self._target = Target(target.port, target.key)
        self._begin_s = time.monotonic()
        self._lives_s: list[float] = []
        kinds = ((b"", b""), (b"GET /health HTTP/1.1\r\nX: ", b"a"), (head(COMPLETIONS, 4000, target.key), b" "))
        self._tasks = [asyncio.create_task(self._hold(*kind)) for kind in kinds for _ in range(self.NUM_EACH)]

    async def _hold(self, begin: bytes, drip: bytes) -> None:
        await crawl(self._target, begin, drip, 1, HOLDERS)
        self._lives_s.append(time.monotonic() - self._begin_s)

    def state(self) -> dict[str, Any]:
        longest = max(self._lives_s, default=0.0)
        return {"opened": len(self._tasks), "closed": len(self._lives_s), "longest_closed_s": longest}


async def serve_commands(port: int, key: str, names: Sequence[str]) -> None:
    target = Target(port, key)
    prepared = {name: ATTACKS[name].prepare(target) for name in names}
    holders = Holders(target)
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        target.answers.clear()
        target.samples.clear()
        attack, requests = ATTACKS[command["attack"]], prepared[command["attack"]]
        target.end_s = time.monotonic() + command["seconds"]
        try:
            await asyncio.wait_for(attack.run(target, requests), command["seconds"] + attack.grace_s)
        except TimeoutError:
            if attack.grace_s:
                target.answers["unanswered"] += 1
        told = {"answers": dict(target.answers), "samples": target.samples, "held": holders.state()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    os.nice(10)
    asyncio.run(serve_commands(int(sys.argv[1]), os.environ["HOSTILE_KEY"], sys.argv[2:]))
