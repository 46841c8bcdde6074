"""What each training-free drafting method gives: acceptance, drafting time and speed, per category of prompt.

    python benchmarks/methods.py spec_bench.jsonl
    python benchmarks/methods.py spec_bench.jsonl --methods ngram '{"method": "merge", "node_budget": 16}' --limit 40
    python benchmarks/methods.py repetitive,random --per-category 8

The prompts are a file (JSON lines in Spec-Bench's form: `category`, `turns`) or categories of our own. Prints a table
for each temperature, then one JSON line. Tokens are counted by id; a request that failed is excluded and counted, never
timed.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.provenance import provenance
from paceline.bench.workloads import Prompt, load_workload
from paceline.core.outputs import RequestMetrics
from paceline.models.loader import LoadedModel, load_model

DEFAULT_METHODS = (
    '{"method": "none"}',
    "ngram",
    '{"method": "ngram", "num_speculative_tokens": 16, "node_budget": 32}',
    "suffix",
    '{"method": "suffix", "node_budget": 32}',
    '{"method": "recycling", "node_budget": 32}',
    "recycling",
    "lookahead",
    '{"method": "merge", "members": ["ngram", "suffix", "recycling"], "node_budget": 32}',
    '{"method": "draft_model", "num_draft_layers": 20}',
    "layer_skip",
)


@dataclass(slots=True)
class Totals:
    tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted: int = 0

    def add(self, metrics: RequestMetrics) -> None:
        self.tokens += metrics.num_output_tokens
        self.steps += metrics.num_steps
        self.draft_tokens += metrics.num_draft_tokens
        self.accepted += metrics.num_accepted_tokens

    @property
    def length(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


@dataclass(slots=True)
class Result:
    config: dict[str, Any]
    temperature: float
    all: Totals = field(default_factory=Totals)
    by_category: dict[str, Totals] = field(default_factory=lambda: defaultdict(Totals))
    seconds: float = 0.0
    draft_ms_per_step: float = 0.0
    failed: int = 0
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        extra = [f"{k}={v}" for k, v in self.config.items() if k not in ("method", "members")]
        members = f"({','.join(self.config['members'])})" if "members" in self.config else ""
        short = " ".join(extra).replace("num_speculative_tokens", "K").replace("node_budget", "nodes")
        return f"{self.config['method']}{members} {short}".strip()

    def record(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "temperature": self.temperature,
            "mean_acceptance_length": self.all.length,
            "draft_acceptance_rate": self.all.accepted / max(1, self.all.draft_tokens),
            "nodes_per_step": self.all.draft_tokens / max(1, self.all.steps),
            "draft_ms_per_step": self.draft_ms_per_step,
            "tokens_per_s": self.all.tokens / self.seconds,
            "tokens": self.all.tokens,
            "failed": self.failed,
            "by_category": {name: totals.length for name, totals in self.by_category.items()},
        }


def main() -> None:
    args = parse_arguments()
    rows = load_prompts(args.prompts, args.limit, args.per_category)
    model = load_model(
        args.model, quantization=None if args.quantization == "none" else args.quantization, num_threads=args.threads
    )
    record: dict[str, Any] = {"benchmark": "methods", **provenance(vars(args)), "results": []}
    for temperature in args.temperatures:
        results = [measure(model, parse_config(text), temperature, rows, args) for text in args.methods]
        print_table(results, temperature, len(rows))
        check_equal(results)
        record["results"] += [result.record() for result in results]
    print(json.dumps(record))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a JSON lines file with category and turns, or categories such as code,random")
    parser.add_argument("--methods", nargs="+", default=list(DEFAULT_METHODS), help="names or JSON configurations")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto", help="auto, none, int8 or gguf")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--limit", type=int, help="that many prompts, spread over the file")
    parser.add_argument("--per-category", type=int, help="that many prompts of each category")
    return parser.parse_args()


def load_prompts(name: str, limit: int | None, per_category: int | None) -> list[Prompt]:
    prompts = load_workload(name)
    if per_category is not None:
        seen: dict[str, int] = defaultdict(int)
        kept = []
        for prompt in prompts:
            seen[prompt.category] += 1
            if seen[prompt.category] <= per_category:
                kept.append(prompt)
        prompts = kept
    if limit is not None and limit < len(prompts):
        prompts = [prompts[i * len(prompts) // limit] for i in range(limit)]
    return prompts


def parse_config(text: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(text) if text.startswith("{") else {"method": text}
    return config


def measure(
    model: LoadedModel,
    config: dict[str, Any],
    temperature: float,
    rows: Sequence[Prompt],
    args: argparse.Namespace,
) -> Result:
    llm = LLM(model, config, max_num_seqs=args.concurrency, max_model_len=2048, kv_cache_memory_bytes=1 << 30)
    prompts = [llm.chat_prompt([{"role": "user", "content": row.text}]) if row.chat else row.text for row in rows]
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens)
    begin_s = time.perf_counter()
    outputs = llm.generate(list(prompts), params)
    result = Result(config, temperature, seconds=time.perf_counter() - begin_s)
    for row, output in zip(rows, outputs, strict=True):
        if output.error is not None or output.metrics is None:
            result.failed += 1
            continue
        result.all.add(output.metrics)
        result.by_category[row.category].add(output.metrics)
    result.outputs = [output.outputs[0].token_ids for output in outputs]
    stats = llm.stats()
    print(f"{result.name}: {result.all.length:.2f}", file=sys.stderr, flush=True)
    drafting_s = sum(figures["draft_s"] for figures in stats["speculation"].values())
    result.draft_ms_per_step = drafting_s / max(1, stats["num_steps"]) * 1e3
    return result


def print_table(results: Sequence[Result], temperature: float, num_prompts: int) -> None:
    categories = list(results[0].by_category)
    print(f"\nT={temperature}, {num_prompts} prompts; per category: mean acceptance length")
    head = ["method", "length", "rate", "nodes", "draft ms", "tok/s", *(c[:7] for c in categories)]
    lines = [head]
    for result in results:
        figures = result.record()
        lines.append(
            [
                result.name[:44],
                f"{result.all.length:.2f}",
                f"{figures['draft_acceptance_rate']:.2f}",
                f"{figures['nodes_per_step']:.1f}",
                f"{figures['draft_ms_per_step']:.2f}",
                f"{figures['tokens_per_s']:.1f}",
                *(f"{result.by_category[category].length:.2f}" for category in categories),
            ]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join(cells), flush=True)


def check_equal(results: Sequence[Result]) -> None:
    """Speculation never changes the output: every method must have emitted the same tokens."""
    for result in results[1:]:
        different = sum(a != b for a, b in zip(result.outputs, results[0].outputs, strict=True))
        if different:
            print(f"NOT EQUAL: {result.name} differs from {results[0].name} on {different} prompts")


if __name__ == "__main__":
    main()
