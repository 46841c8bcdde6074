"""Is an answer the same, bit for bit, however its KV came? And what does each way save of the first token's time?

    python benchmarks/kv_exact.py [--model smollm2-135m] [--prompts 200] [--tokens 16]
                                  [--methods none,ngram,eagle3,auto] [--long 512,1500] [--routed [--streams 4]]

Each prompt is answered greedily and seeded, by each method, on engines of one process: computed locally, after an
import of another engine's blocks, resumed after some delivered tokens, and with KV brought back from a folder. With
`--routed` instead by worker processes: the router chooses one of two decode workers, which fetches over TCP what a
prefill worker computed. Counts answers whose tokens or log-probabilities differ from the local ones (the exit code is 1
where any does), and the passes of `eagle3`, which must be the local ones after an import. Then, for prompts of each
`--long` number of tokens, the time to the first token: computed, imported (export and import counted), and brought back
from memory and from a folder.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from typing import Any

from cluster_load import Answered, Ask, answer_all, fleet, worker_command

from paceline import LLM, SamplingParams
from paceline.bench.run.provenance import provenance
from paceline.bench.workloads.workload import take
from paceline.cluster.backend import ClusterBackend
from paceline.cluster.status import ask as ask_worker
from paceline.core.outputs import RequestOutput
from paceline.models.loader import LoadedModel, load_model
from paceline.spec.config.speculative_config import SIZE_KEYS, SpeculativeConfig

KINDS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8}}
WAYS = ("imported", "resumed", "folder")
ROLES = ("prefill", "decode", "decode")  # of the workers of `routed`
OWN_TOKEN = 1000  # the first of so many that prompts begin with there
Prompts = list[list[int]]


def drafting(method: str) -> dict[str, Any]:
    """At its default size: by price, passes would depend on time."""
    config = SpeculativeConfig.parse({"method": method})
    assert config is not None
    return {"method": method} | {key: config.options[key] for key in SIZE_KEYS if config.options.get(key) is not None}


def make(loaded: LoadedModel, method: str, **options: Any) -> LLM:
    sizes: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 2048}
    return LLM(loaded, drafting(method), **sizes, **options)


def send(source: LLM, target: LLM, prompt: list[int]) -> int:
    """One prompt's blocks from engine to engine; how many arrived."""
    out, into = source.engine.core.exchange, target.engine.core.exchange
    keys = out.usable(prompt)
    lease = out.pin([key.hash for key in keys])
    ticket = into.reserve(keys[: len(lease.hashes)])
    verified = [i for i in ticket.missing if into.write(ticket, i, out.read(lease, i))]
    out.release(lease)
    return into.commit(ticket, verified)


def bits(output: RequestOutput, begin: int = 0) -> tuple[Any, ...]:
    [sample] = output.outputs
    return sample.token_ids[begin:], (sample.token_logprobs or [])[begin:]


def num_passes(output: RequestOutput) -> int:
    return 0 if output.metrics is None else output.metrics.num_steps


def sampling(kind: str, count: int, num_tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=2, seed=i, **KINDS[kind]) for i in range(count)
    ]


def compare(loaded: LoadedModel, method: str, kind: str, prompts: Prompts, num_tokens: int) -> dict[str, Any]:
    """How many answers differ, by way; and the passes of all answers, local and imported, one prompt at a time."""
    params = sampling(kind, len(prompts), num_tokens)
    with tempfile.TemporaryDirectory() as folder:
        local, imported = make(loaded, method), make(loaded, method)
        kept = make(loaded, method, kv_offload=f"{folder}:8GiB")
        for llm in (local, imported):
            _ = llm.engine.core.exchange
        found: dict[str, Any] = dict.fromkeys(WAYS, 0) | {"passes": 0, "passes_imported": 0}
        for i, (prompt, options) in enumerate(zip(prompts, params, strict=True)):
            [expected] = local.generate(prompt, options, use_tqdm=False)
            send(local, imported, prompt)
            [after_import] = imported.generate(prompt, options, use_tqdm=False)
            cut = 1 + i % (num_tokens - 1)
            delivered = {"prompt_token_ids": prompt, "output_token_ids": expected.outputs[0].token_ids[:cut]}
            [resumed] = imported.generate(delivered, options, use_tqdm=False)
            kept.generate(prompt, options, use_tqdm=False)
            kept.engine.core.kv.pool.forget_all()
            [back] = kept.generate(prompt, options, use_tqdm=False)
            assert (back.num_cached_tokens or 0) >= (len(prompt) - 1) // 16 * 16, "it was meant to come from the folder"
            found["imported"] += bits(after_import) != bits(expected)
            found["resumed"] += bits(resumed) != bits(expected, cut)
            found["folder"] += bits(back) != bits(expected)
            found["passes"] += num_passes(expected)
            found["passes_imported"] += num_passes(after_import)
    return found


def compare_routed(
    args: argparse.Namespace, loaded: LoadedModel, method: str, kind: str, prompts: Prompts
) -> dict[str, Any]:
    """The same for answers of a cluster, several at a time, and how many blocks each decode worker fetched.

    Each prompt begins with a token of its own. A block that two prompts share has a drafter's last row made with the
    next token of the prompt that came first, and which one that is differs between a cluster and one engine."""
    prompts = [[OWN_TOKEN + i, *prompt] for i, prompt in enumerate(prompts)]
    asks = [Ask(0.0, prompt, args.tokens, i, KINDS[kind]["temperature"]) for i, prompt in enumerate(prompts)]
    options = ["--speculative-config", json.dumps(drafting(method))]
    options += ["--kv-cache-memory-bytes", str(1 << 30), "--max-model-len", "2048"]
    with fleet(worker_command(args.model, 1, options), ROLES) as workers:
        addresses = workers.addresses()
        backend = ClusterBackend(addresses, loaded.tokenizer, "kv_aware", "remote")
        answers = sorted(asyncio.run(ask_all(backend, asks, args.streams)), key=lambda one: one.ask.seed)
        figures = [asyncio.run(ask_worker(*address)) for address in addresses]
    found: dict[str, Any] = {"routed": 0, "passes": 0, "passes_imported": 0}
    found["fetched"] = [one["num_fetched_blocks"] for one in figures if one["role"] == "decode"]
    local = make(loaded, method)
    for prompt, options, answer in zip(prompts, sampling(kind, len(prompts), args.tokens), answers, strict=True):
        [expected] = local.generate(prompt, options, use_tqdm=False)
        [sample] = expected.outputs
        logprobs = [one.logprob for one in sample.token_logprobs or []]
        found["routed"] += (answer.error, answer.token_ids, answer.logprobs) != (None, sample.token_ids, logprobs)
        found["passes"] += num_passes(expected)
        found["passes_imported"] += answer.num_passes
    return found


async def ask_all(backend: ClusterBackend, asks: list[Ask], num_streams: int) -> list[Answered]:
    await backend.start().tried()
    try:
        return await answer_all(backend, asks, num_streams)
    finally:
        await backend.stop()


def first_token_s(llm: LLM, prompt: list[int]) -> float:
    begin_s = time.perf_counter()
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return time.perf_counter() - begin_s


def times(loaded: LoadedModel, num_tokens: int, rounds: int = 3) -> dict[str, float]:
    """Milliseconds to the first token, the least of the rounds."""
    words = [loaded.tokenizer.encode(f" {i * i + 7}")[-1] for i in range(200)]
    best: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        source, target = make(loaded, "none"), make(loaded, "none")
        offloads = {"memory": make(loaded, "none", kv_offload="4GiB")}
        offloads["folder"] = make(loaded, "none", kv_offload=f"{folder}:8GiB")
        for llm in (source, target):
            _ = llm.engine.core.exchange
        for round_ in range(rounds):
            prompt = [words[(i * (round_ + 3)) % len(words)] for i in range(num_tokens)]
            seconds = {"computed": first_token_s(source, prompt)}
            begin_s = time.perf_counter()
            send(source, target, prompt)
            seconds["moved"] = time.perf_counter() - begin_s
            seconds["imported"] = seconds["moved"] + first_token_s(target, prompt)
            for name, llm in offloads.items():
                first_token_s(llm, prompt)
                assert llm.engine.core.offload is not None
                llm.engine.core.offload.flush()
                llm.engine.core.kv.pool.forget_all()
                seconds[name] = first_token_s(llm, prompt)
            best = {name: min(1e3 * value, best.get(name, 1e9)) for name, value in seconds.items()}
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--methods", default="none,ngram,eagle3,auto")
    parser.add_argument("--long", default="512,1500")
    parser.add_argument("--routed", action="store_true", help="worker processes behind a router")
    parser.add_argument("--streams", type=int, default=4, help="routed: requests at a time")
    args = parser.parse_args()
    ways = ("routed",) if args.routed else WAYS
    loaded = load_model(args.model, quiet=True)
    prompts = [loaded.tokenizer.encode(prompt.text)[:512] for prompt in take("all", args.prompts)]
    rows, num_wrong = [], 0
    print(f"{'method':8} {'kind':7} {'answers':>7}  differ: {' '.join(ways)}   passes local, imported")
    for method in args.methods.split(","):
        for kind in KINDS:
            if args.routed:
                found = compare_routed(args, loaded, method, kind, prompts)
            else:
                found = compare(loaded, method, kind, prompts, args.tokens)
            differ = [found[way] for way in ways]
            num_wrong += sum(differ)
            rows.append({"method": method, "kind": kind, "answers": len(prompts), **found})
            shown = " ".join(f"{count:8d}" for count in differ)
            print(f"{method:8} {kind:7} {len(prompts):7d} {shown}   {found['passes']:6d} {found['passes_imported']:6d}")
    first = {count: times(loaded, int(count)) for count in args.long.split(",") if count}
    for count, milliseconds in first.items():
        print(f"{count} prompt tokens, first token: {', '.join(f'{k} {v:.1f} ms' for k, v in milliseconds.items())}")
    print(json.dumps({"exact": rows, "first_token_ms": first, **provenance(vars(args))}))
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
