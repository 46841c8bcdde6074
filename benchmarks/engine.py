"""The engine beside transformers and beside itself: speed, batching, prefix reuse, overhead, memory.

    python benchmarks/engine.py [--model smollm2-135m] [--rounds 5]

Sides alternate inside one run and medians are compared, because machines drift. Prints a table, then one JSON line.
Each line carries its target, and says so when it is missed. `transformers` is a peer, not a dependency: without it,
that line is left out.
"""

import argparse
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline import LLM, SamplingParams, __version__
from paceline.core.outputs import RequestOutput
from paceline.models.loader import LoadedModel, load_model
from paceline.spec.config.speculative_config import at_default_size

TEXT = "The lighthouse keeper climbed the stairs every evening, and every evening he counted them. "
PLAIN = {"method": "none"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model = load_model(args.model, dtype=args.dtype, quiet=True)
    lines: list[dict[str, Any]] = []
    for measure in (against_transformers, batching, prefix_reuse, overhead, memory):
        print(f"measuring {measure.__name__.replace('_', ' ')} ...", file=sys.stderr, flush=True)
        lines += measure(args, model)
        gc.collect()
    for line in lines:
        verdict = "ok" if line["reached"] else "MISSED"
        print(f"{line['what']:<58} {line['value']:>10.3f}  {line['target']:<12} {verdict}  {line['detail']}")
    print(json.dumps({"lines": lines, "arguments": vars(args), **provenance()}))
    return 0


def line(what: str, value: float, target: str, reached: bool, detail: str = "") -> dict[str, Any]:
    return {"what": what, "value": value, "target": target, "reached": reached, "detail": detail}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def decode_tok_s(output: RequestOutput) -> float:
    assert output.metrics is not None and output.metrics.tpot_s is not None
    return 1 / output.metrics.tpot_s


def alternate(rounds: int, **sides: Callable[[], float]) -> dict[str, list[float]]:
    results: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in list(sides.items())[:: 1 if turn % 2 else -1]:
            value = side()
            if turn:  # the first turn warms up
                results[name].append(value)
    return results


def against_transformers(args: argparse.Namespace, model: LoadedModel) -> list[dict[str, Any]]:
    """Plain decode at batch 1: tokens after the first, per second, both in the same dtype and threads."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return []
    peer = AutoModelForCausalLM.from_pretrained(model.path, dtype=model.decoder.dtype).eval()
    llm = LLM(model, PLAIN, max_model_len=1024)
    prompt = llm.get_tokenizer().encode(TEXT)

    def ours() -> float:
        return decode_tok_s(llm.generate(prompt, greedy(args.tokens))[0])

    def theirs() -> float:
        def seconds(count: int) -> float:
            begin = time.perf_counter()
            with torch.inference_mode():
                peer.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
            return time.perf_counter() - begin

        return (args.tokens - 1) / (seconds(args.tokens) - seconds(1))

    sides = alternate(args.rounds, paceline=ours, transformers=theirs)
    ratio = statistics.median(sides["paceline"]) / statistics.median(sides["transformers"])
    detail = ", ".join(f"{name} {statistics.median(v):.1f} tok/s" for name, v in sides.items())
    return [line("plain decode, batch 1, over transformers.generate", ratio, ">= 1.3", ratio >= 1.3, detail)]


def batching(args: argparse.Namespace, model: LoadedModel) -> list[dict[str, Any]]:
    llm = LLM(model, PLAIN, max_model_len=1024, enable_prefix_caching=False)
    prompt = llm.get_tokenizer().encode(TEXT)

    def tok_s(count: int) -> float:
        begin = time.perf_counter()
        llm.generate([prompt] * count, greedy(args.tokens))
        return count * args.tokens / (time.perf_counter() - begin)

    sides = alternate(args.rounds, one=lambda: tok_s(1), sixteen=lambda: tok_s(16))
    one, sixteen = statistics.median(sides["one"]), statistics.median(sides["sixteen"])
    detail = f"{one:.1f} -> {sixteen:.1f} tok/s"
    return [
        line("16 requests together, tokens/s over one request's", sixteen / one, ">= 2.5", sixteen >= 2.5 * one, detail)
    ]


def prefix_reuse(args: argparse.Namespace, model: LoadedModel) -> list[dict[str, Any]]:
    llm = LLM(model, PLAIN, max_model_len=2048)
    base = llm.get_tokenizer().encode(TEXT * 80)[:1000]
    ratios, times = [], []
    for turn in range(args.rounds):
        prefix = [turn + 1, *base[1:]]  # a prefix that nobody has seen
        ttft = []
        for tail in (5, 6):
            metrics = llm.generate([*prefix, tail], greedy(1))[0].metrics
            assert metrics is not None and metrics.ttft_s is not None
            ttft.append(metrics.ttft_s)
        times.append(ttft)
        ratios.append(ttft[1] / ttft[0])
    first, second = (statistics.median(t[i] for t in times) * 1000 for i in (0, 1))
    ratio = statistics.median(ratios)
    detail = f"{first:.0f} ms -> {second:.0f} ms to the first token"
    return [line("same 1,000-token prefix, second start over first", ratio, "< 0.25", ratio < 0.25, detail)]


def overhead(args: argparse.Namespace, model: LoadedModel) -> list[dict[str, Any]]:
    """Share of the step spent outside the model: schedule, verify, commit, propose."""
    lines = []
    for batch, limit in ((1, 0.05), (32, 0.10)):
        for method in (None, "ngram"):
            llm = LLM(model, at_default_size({"method": method} if method else PLAIN), max_model_len=1024)
            prompts = [[i + 1, *llm.get_tokenizer().encode(TEXT * 2)] for i in range(batch)]
            llm.generate(prompts, greedy(4))
            llm.engine.core.clock.reset()
            llm.generate(prompts, greedy(args.tokens))
            seconds = llm.engine.core.clock.seconds
            outside = sum(s for phase, s in seconds.items() if phase != "execute")
            share = outside / sum(seconds.values())
            detail = ", ".join(f"{p} {s / llm.engine.core.clock.num_steps * 1e6:.0f} us" for p, s in seconds.items())
            what = f"step time outside the model, batch {batch}, {method or 'plain'}"
            lines.append(line(what, share, f"< {limit:.2f}", share < limit, detail))
    return lines


def memory(args: argparse.Namespace, model: LoadedModel) -> list[dict[str, Any]]:
    """Peak resident memory of a fresh process beside what weights and KV pool account for (informative)."""
    pool = 256 << 20
    script = (
        "import resource, sys; from paceline import LLM, SamplingParams;"
        f"llm = LLM({args.model!r}, {PLAIN}, dtype={args.dtype!r}, kv_cache_memory_bytes={pool}, max_model_len=1024);"
        f"llm.generate([{TEXT!r}] * 8, SamplingParams(temperature=0, max_tokens=16));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    peak = int(done.stdout.split()[-1]) * 1024
    config = model.config
    per_layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    heads = 1 if config.tie_word_embeddings else 2
    weights = (per_layer * config.num_layers + heads * config.vocab_size * config.hidden_size) * (
        model.decoder.dtype.itemsize
    )
    floor = weights + pool
    detail = f"peak {peak >> 20} MiB; weights {weights >> 20} + KV pool {pool >> 20} MiB; rest is python and torch"
    return [line("peak memory over weights + KV pool", peak / floor, "(told)", True, detail)]


def provenance() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip() or None,
        "paceline": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "max_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


if __name__ == "__main__":
    sys.exit(main())
