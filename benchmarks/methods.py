"""What each drafting method gives: acceptance, drafting time and speed, per category of prompt, beside plain decoding.

    python benchmarks/methods.py spec_bench.jsonl --out methods.jsonl --markdown methods.md       all 240 prompts: hours
    python benchmarks/methods.py spec_bench.jsonl --per-category 2 --temperatures 0               half an hour
    python benchmarks/methods.py spec_bench.jsonl --methods ngram '{"method": "merge", "node_budget": 16}' --limit 40
    python benchmarks/methods.py --text random repetitive --per-category 4                        both ends of the scale
    python benchmarks/methods.py spec_bench.jsonl --trained                                     the trained drafters too

The prompts are a file (JSON lines in Spec-Bench's form: `category`, `turns`) or categories of our own. One prompt at a
time goes through every method in turn, plain decoding first, so that a busy spell of the machine falls on all of them
and tokens per second can be compared. Every answer becomes a line of `--out`; a run that is started again goes on
where the last one stopped. Prints a table for each temperature, then one JSON line. Tokens are counted by id; a request
that failed is excluded and counted, never timed; an answer that differs from plain decoding's is reported.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from methods_table import as_markdown, as_text, label, summarize

from paceline import LLM, SamplingParams
from paceline.bench.run.provenance import provenance
from paceline.bench.workloads.workload import Prompt, load_workload
from paceline.models.loader import LoadedModel, load_model

PLAIN: dict[str, Any] = {"method": "none"}
MERGED = ["ngram", "suffix", "recycling"]
TRAINING_FREE: list[dict[str, Any]] = [
    {"method": "ngram"},
    {"method": "ngram", "num_speculative_tokens": 16, "node_budget": 32},
    {"method": "suffix"},
    {"method": "suffix", "node_budget": 32},
    {"method": "recycling", "node_budget": 32},
    {"method": "recycling"},
    {"method": "lookahead"},
    {"method": "merge", "members": MERGED, "node_budget": 32},
    {"method": "merge", "members": MERGED, "node_budget": 40},
    {"method": "draft_model", "num_draft_layers": 20},
    {"method": "layer_skip"},
]
TRAINED: list[dict[str, Any]] = [
    {"method": "eagle3"},
    {"method": "eagle3", "num_speculative_tokens": 4, "node_budget": 4},
    {"method": "eagle3", "num_speculative_tokens": 4, "node_budget": 32},
    {"method": "eagle3", "num_speculative_tokens": 8, "node_budget": 32},
    {"method": "medusa", "node_budget": 32},
    {"method": "dflash", "node_budget": 32},
    {"method": "draft_model", "num_speculative_tokens": 4},
    {"method": "merge", "members": ["eagle3", *MERGED], "num_speculative_tokens": 8, "node_budget": 32},
    {"method": "auto"},
]
Record = dict[str, Any]
Key = tuple[str, float, str]  # configuration, temperature, prompt


def main() -> None:
    args = parse_arguments()
    prompts = load_prompts(args)
    configs = [PLAIN, *(config for config in chosen_methods(args) if config != PLAIN)]
    done = read_records(args.out, args)
    model = load_model(
        args.model, quantization=None if args.quantization == "none" else args.quantization, num_threads=args.threads
    )
    report: dict[str, Any] = {
        "benchmark": "methods",
        **provenance({k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}),
        "results": [],
    }
    pages = []
    for temperature in args.temperatures:
        records = run(model, configs, temperature, prompts, args, done)
        results = summarize(configs, records)
        title = f"T={temperature:g}, {len(prompts)} prompts, {args.max_tokens} new tokens"
        print(f"\n{title}; per category: mean acceptance length\n{as_text(results)}", flush=True)
        pages.append(f"### {title}\n\n{as_markdown(results)}\n")
        report["results"] += [{"temperature": temperature, **result} for result in results]
    if args.markdown is not None:
        args.markdown.write_text("\n".join(pages), encoding="utf-8")
    line = json.dumps(report)
    if args.json is not None:
        args.json.write_text(line + "\n", encoding="utf-8")
    print(line)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="?", help="a JSON lines file with category and turns, or our own categories")
    parser.add_argument(
        "--text", nargs="+", metavar="CATEGORY", help="categories of our own, such as random repetitive"
    )
    parser.add_argument("--methods", nargs="+", help="names or JSON configurations; without: all that need no training")
    parser.add_argument("--trained", action="store_true", help="the trained drafters as well")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--quantization", default="auto", help="auto, none, int8 or gguf")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="that many prompts, spread over the file")
    parser.add_argument("--per-category", type=int, help="that many prompts of each category")
    parser.add_argument("--out", type=Path, help="one JSON line per answer; answers already there are not asked again")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the closing JSON line, also into this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the tables as Markdown")
    args = parser.parse_args()
    if (args.prompts is None) == (args.text is None):
        parser.error("give either a file of prompts or --text with categories")
    return args


def load_prompts(args: argparse.Namespace) -> list[Prompt]:
    prompts = load_workload(args.prompts if args.text is None else ",".join(args.text))
    if args.per_category is not None:
        seen: dict[str, int] = defaultdict(int)
        kept = []
        for prompt in prompts:
            seen[prompt.category] += 1
            if seen[prompt.category] <= args.per_category:
                kept.append(prompt)
        prompts = kept
    if args.limit is not None and args.limit < len(prompts):
        prompts = [prompts[i * len(prompts) // args.limit] for i in range(args.limit)]
    return prompts


def chosen_methods(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.methods is None:
        return [*TRAINING_FREE, *(TRAINED if args.trained else [])]
    given = [json.loads(text) if text.startswith("{") else {"method": text} for text in args.methods]
    return [*given, *(TRAINED if args.trained else [])]


def run(
    model: LoadedModel,
    configs: Sequence[dict[str, Any]],
    temperature: float,
    prompts: Sequence[Prompt],
    args: argparse.Namespace,
    done: dict[Key, Record],
) -> list[Record]:
    """One record per method and prompt, those of an earlier run included."""
    wanted = [(prompt, config) for prompt in prompts for config in configs]
    missing = [(p, c) for p, c in wanted if (key(c), temperature, p.prompt_id) not in done]
    engines: dict[str, LLM] = {}
    begin_s = time.perf_counter()
    for i, (prompt, config) in enumerate(missing):
        if key(config) not in engines:
            engines[key(config)] = LLM(
                model, config, max_num_seqs=1, max_model_len=2048, kv_cache_memory_bytes=128 << 20
            )
        record = ask(engines[key(config)], prompt, config, temperature, args)
        done[key(config), temperature, prompt.prompt_id] = record
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        left_s = (time.perf_counter() - begin_s) / (i + 1) * (len(missing) - i - 1)
        progress = f"T={temperature:g} {i + 1}/{len(missing)}, {left_s / 60:.0f} min left: {label(config)}"
        print(f"\r{progress[:110]:<110}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return [done[key(config), temperature, prompt.prompt_id] for prompt, config in wanted]


def ask(llm: LLM, prompt: Prompt, config: dict[str, Any], temperature: float, args: argparse.Namespace) -> Record:
    text = llm.chat_prompt([{"role": "user", "content": prompt.text}]) if prompt.chat else prompt.text
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.max_tokens)
    begin_s = time.perf_counter()
    [output] = llm.generate([text], params)
    seconds = time.perf_counter() - begin_s
    record: Record = {
        "model": args.model,
        "max_tokens": args.max_tokens,
        "config": config,
        "temperature": temperature,
        "prompt": prompt.prompt_id,
        "category": prompt.category,
    }
    metrics = output.metrics
    if output.error is not None or metrics is None:
        return record | {"error": repr(output.error)}
    return record | {
        "seconds": seconds,
        "ttft_s": metrics.ttft_s,
        "draft_s": metrics.draft_s,
        "steps": metrics.num_steps,
        "drafts": metrics.num_drafts,
        "nodes": metrics.num_draft_tokens,
        "accepted": metrics.num_accepted_tokens,
        "accepted_per_position": metrics.accepted_per_position,
        "by_member": {name: counts.to_dict() for name, counts in metrics.by_member.items()},
        "token_ids": output.outputs[0].token_ids,
    }


def key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def read_records(path: Path | None, args: argparse.Namespace) -> dict[Key, Record]:
    """Answers of an earlier run with the same model and length; failed ones are asked again."""
    if path is None or not path.exists():
        return {}
    lines: Iterable[Record] = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {
        (key(r["config"]), r["temperature"], r["prompt"]): r
        for r in lines
        if (r["model"], r["max_tokens"]) == (args.model, args.max_tokens) and "error" not in r
    }


if __name__ == "__main__":
    main()
