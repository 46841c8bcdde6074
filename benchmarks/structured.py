"""Structured outputs: do answers validate, are they the same with speculation, and what does it cost?

    python benchmarks/structured.py schemas [--count 300] [--methods none,ngram,eagle3,merge,auto] [--tokens 160]
    python benchmarks/structured.py speed   [--rounds 7] [--tokens 160]
    python benchmarks/structured.py compile [--properties 2000] [--rounds 5]

`schemas`: our own schemas of rising difficulty, at temperature 0 and 1, with every method. Every finished answer must
validate (`jsonschema`), and with every method all answers must be those of plain decoding with that seed.

`speed`, in turns, medians: plain decoding with and without a schema; `auto` and plain decoding on schema extraction;
how much of a step the engine waits for masks, and takes longer to choose tokens, at batch 1 and 32.

`compile`: a stream's longest gap between two tokens while a large schema is compiled, and while none is.

Prints a table, then one JSON line; the exit code is 1 where a promise of docs/structured.md does not hold.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
from structured_schemas import large_schema, schemas
from structured_texts import EXTRACTION_SCHEMA, LONG_SCHEMA, extraction_prompts

from paceline import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from paceline.bench.run.provenance import provenance
from paceline.core.outputs import RequestOutput, RequestOutputKind
from paceline.models.loader import LoadedModel, load_model
from paceline.spec.config.speculative_config import at_default_size

METHODS = ("none", "ngram", "eagle3", "merge", "auto")
MAX_PLAIN_COST, MIN_AUTO_SPEEDUP, MAX_MASK_SHARE = 1.05, 1.6, 0.03


def constrained(schema: dict[str, Any], **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), **options)


# Validity and equality


def check_schemas(model: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    made = [schema for _, schema in schemas(args.count)]
    jobs = [(schema, temperature) for schema in made for temperature in (0.0, 1.0)]
    params = [constrained(s, temperature=t, seed=i, max_tokens=args.tokens) for i, (s, t) in enumerate(jobs)]
    truth: list[list[int]] = []
    rows: dict[str, Any] = {}
    for method in dict.fromkeys(("none", *args.methods.split(","))):
        llm = LLM(model, at_default_size({"method": method}), max_num_seqs=16, max_model_len=1024)
        prompts = [llm.chat_prompt([{"role": "user", "content": ask(schema)}]) for schema, _ in jobs]
        begin_s = time.perf_counter()
        outputs = llm.generate(prompts, params)
        took_s = time.perf_counter() - begin_s
        tokens = [output.outputs[0].token_ids for output in outputs]
        truth = truth or tokens
        rows[method] = {
            "answers": len(outputs),
            "finished": sum(output.outputs[0].finish_reason == "stop" for output in outputs),
            "invalid": sum(not is_valid(output, schema) for output, (schema, _) in zip(outputs, jobs, strict=True)),
            "failed": sum(output.error is not None for output in outputs),
            "differing": sum(one != other for one, other in zip(tokens, truth, strict=True)),
            "tokens_per_s": sum(map(len, tokens)) / took_s,
            **mask_share(llm),
        }
        print(f"{method:12}", rows[method], flush=True)
    passed = all(row["invalid"] == row["failed"] == row["differing"] == 0 for row in rows.values())
    return {"passed": passed, "methods": rows}


def ask(schema: dict[str, Any]) -> str:
    return f"Make up an example with {', '.join(schema['properties'])}, as short JSON."


def is_valid(output: RequestOutput, schema: dict[str, Any]) -> bool:
    """A finished answer validates; one that was cut off must be the beginning of something."""
    answer = output.outputs[0]
    if answer.finish_reason != "stop":
        return output.error is None
    try:
        jsonschema.validate(json.loads(answer.text), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        print("invalid:", json.dumps(schema), answer.text, str(error)[:200], sep="\n  ")
        return False
    return True


def mask_share(llm: LLM) -> dict[str, float]:
    stats = llm.stats()
    figures, step_s = stats["structured"], sum(stats["step_seconds"].values())
    return {"mask_share": figures["mask_s"] / step_s, "mask_wait_share": figures["mask_wait_s"] / step_s}


# Speed


def measure_speed(model: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    plain = LLM(model, {"method": "none"}, max_num_seqs=64, max_model_len=2048)
    auto = LLM(model, {"method": "auto"}, max_num_seqs=64, max_model_len=2048)
    free = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    bound = constrained(LONG_SCHEMA, temperature=0, max_tokens=args.tokens)
    extract = constrained(EXTRACTION_SCHEMA, temperature=0, max_tokens=400)
    prompts = extraction_prompts()
    found = alternate(
        {
            "unconstrained plain": lambda: token_rate(plain, prompts[:2], free),
            "constrained plain": lambda: token_rate(plain, prompts[:2], bound),
            "extraction, plain": lambda: token_rate(plain, prompts, extract),
            "extraction, auto": lambda: token_rate(auto, prompts, extract),
        },
        args.rounds,
    )
    for name, rate in found.items():
        print(f"{name:24} {rate:8.1f} tokens/s")
    cost = found["unconstrained plain"] / found["constrained plain"]
    speedup = found["extraction, auto"] / found["extraction, plain"]
    shares = {batch: batch_share(model, batch, free, bound, prompts) for batch in (1, 32)}
    print(f"a schema costs plain decoding {cost:.3f}x; auto on extraction is {speedup:.2f}x plain")
    for batch, share in shares.items():
        print(
            f"batch {batch:2}: masks {share['mask_share']:.2%} of the steps' time, waited for "
            f"{share['mask_wait_share']:.2%}; choosing tokens takes {share['choose_share']:.2%} of a step longer, "
            f"passes {share['execute_ratio']:.3f}x"
        )
    exposed = max(share["mask_wait_share"] for share in shares.values())
    passed = cost <= MAX_PLAIN_COST and speedup >= MIN_AUTO_SPEEDUP and exposed < MAX_MASK_SHARE
    return {"passed": passed, "cost": cost, "speedup": speedup, "shares": shares, "tokens_per_s": found}


def alternate(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    for measure in measures.values():
        measure()  # warm
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


def token_rate(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> float:
    """One request at a time; tokens after the first per second after it, so that prompts do not count."""
    num_tokens, seconds = 0, 0.0
    for prompt in prompts:
        begin_s = None
        known = 0
        for output in llm.stream(llm.chat_prompt([{"role": "user", "content": prompt}]), params):
            begin_s = begin_s or time.perf_counter()
            first = known = known or len(output.outputs[0].token_ids)
        assert begin_s is not None
        seconds += time.perf_counter() - begin_s
        num_tokens += len(output.outputs[0].token_ids) - first
    return num_tokens / seconds


def batch_share(
    model: LoadedModel, batch: int, free: SamplingParams, bound: SamplingParams, prompts: Sequence[str]
) -> dict[str, float]:
    """Of a step with a schema: masks made, masks waited for, and what choosing tokens takes longer than without."""
    steps = {}
    for name, params in (("free", free), ("bound", bound)):
        llm = LLM(model, {"method": "none"}, max_num_seqs=64, max_model_len=2048)
        chats = [llm.chat_prompt([{"role": "user", "content": prompts[i % len(prompts)]}]) for i in range(batch)]
        llm.generate(chats, params)
        stats = llm.stats()
        steps[name] = {part: seconds / stats["num_steps"] for part, seconds in stats["step_seconds"].items()}
    step_s = sum(steps["bound"].values())
    return {
        **mask_share(llm),
        "choose_share": (steps["bound"]["verify"] - steps["free"]["verify"]) / step_s,
        "execute_ratio": steps["bound"]["execute"] / steps["free"]["execute"],
    }


# Compiling beside other streams


def measure_compile(model: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    return asyncio.run(_measure_compile(model, args))


async def _measure_compile(model: LoadedModel, args: argparse.Namespace) -> dict[str, Any]:
    llm = AsyncLLM(model, {"method": "none"}, max_model_len=2048)
    llm.prepare_structured_outputs()
    quiet, beside, compile_s = [], [], []
    for i in range(args.rounds):
        quiet.append(await longest_gap(llm, None, compile_s))
        schema = {**large_schema(args.properties), "title": f"round {i}"}  # another text: compiled anew
        beside.append(await longest_gap(llm, schema, compile_s))
    llm.shutdown()
    step_s = statistics.median(gap[1] for gap in quiet)
    figures = {
        "longest_gap_ms": 1e3 * statistics.median(gap[0] for gap in beside),
        "longest_gap_without_ms": 1e3 * statistics.median(gap[0] for gap in quiet),
        "step_ms": 1e3 * step_s,
        "until_first_token_ms": 1e3 * statistics.median(compile_s),
    }
    print(json.dumps(figures))
    delay_ms = figures["longest_gap_ms"] - figures["longest_gap_without_ms"]
    return {"passed": delay_ms <= figures["step_ms"], **figures}


async def longest_gap(
    llm: AsyncLLM, schema: dict[str, Any] | None, compile_s: list[float]
) -> tuple[float, float]:  # seconds: the longest between two tokens of a stream, and the median
    marks: list[float] = []
    task = None
    free = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    async for _ in llm.generate("The sea", free, output_kind=RequestOutputKind.DELTA):
        marks.append(time.perf_counter())
        if len(marks) == 20 and schema is not None:
            task = asyncio.create_task(first_token_s(llm, schema))
    if task is not None:
        compile_s.append(await task)
    gaps = [later - earlier for earlier, later in itertools.pairwise(marks[20:])]
    return max(gaps), statistics.median(gaps)


async def first_token_s(llm: AsyncLLM, schema: dict[str, Any]) -> float:
    begin_s = time.perf_counter()
    async for _ in llm.generate("Now", constrained(schema, temperature=0, max_tokens=1)):
        return time.perf_counter() - begin_s
    raise AssertionError("no token came")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["schemas", "speed", "compile"])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--properties", type=int, default=2000)
    args = parser.parse_args()
    measure = {"schemas": check_schemas, "speed": measure_speed, "compile": measure_compile}[args.what]
    result = measure(load_model(args.model), args)
    print(json.dumps({**provenance(vars(args)), **result}))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
