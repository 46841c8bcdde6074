"""The exported EAGLE-3 drafter in vLLM beside the same drafter here: is it the same network there?

    python benchmarks/vllm_export.py spec_bench.jsonl --vllm-python VENV/bin/python

Exports the shipped drafter in both layouts, answers the same prompts (token ids, greedy, the target in float32) here
and in vLLM, which lives in an interpreter of its own (benchmarks/vllm_peer.py), and compares tokens per pass. An n-gram
row does the same for prompt lookup: there the engines differ by design, in which of several places they copy from.
Ends with exit code 1 where EAGLE-3's ratio is off by more than --tolerance.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.run.provenance import provenance
from paceline.bench.workloads.workload import Prompt, load_workload
from paceline.models.drafters.export import FORMATS, export_eagle3
from paceline.models.drafters.load import load_network
from paceline.models.loader import LoadedModel, load_model

MAX_MODEL_LEN = 4096
PEER = Path(__file__).parent / "vllm_peer.py"


@dataclass(slots=True)
class Row:
    method: str
    engine: str
    outputs: list[list[int]]
    num_passes: int
    num_drafts: int
    num_draft_tokens: int
    accepted_per_position: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes

    def record(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "engine": self.engine,
            "tokens": self.num_tokens,
            "passes": self.num_passes,
            "mean_acceptance_length": round(self.tokens_per_pass, 4),
            "drafts": self.num_drafts,
            "draft_tokens": self.num_draft_tokens,
            "accepted_per_position": self.accepted_per_position,
        }


def main() -> None:
    args = parse_arguments()
    model = load_model(args.model, dtype="float32", quantization=None, num_threads=args.threads)
    if not model.path.is_dir():
        sys.exit(f"{model.path} is one file: vLLM needs the target as a Hugging Face folder")
    prompts = spread(load_workload(args.prompts), args.limit)
    versions: dict[str, str] = {}
    rows: list[Row] = []
    ngram = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    with tempfile.TemporaryDirectory() as folder:
        for method, configs in {"eagle3": drafters(args, model, Path(folder)), "ngram": {"": ngram}}.items():
            if method not in args.methods:
                continue
            ours, token_ids = run_ours(model, next(iter(configs.values())), prompts, args)
            rows.append(ours)
            report_progress(ours)
            for layout, config in configs.items():
                rows.append(run_vllm(model, config, layout, token_ids, args, versions))
                report_progress(rows[-1])
    print_table(rows, args)
    ratios = [row.tokens_per_pass / ours_of(rows, row).tokens_per_pass for row in rows if row.method == "eagle3"]
    record = {"benchmark": "vllm_export", **provenance(vars(args)), "vllm": versions}
    print(json.dumps(record | {"results": [row.record() for row in rows]}))
    sys.exit(any(abs(ratio - 1) > args.tolerance for ratio in ratios))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a JSON lines file with category and turns, or categories such as code,chat")
    parser.add_argument("--vllm-python", required=True, help="the interpreter that has vLLM")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", help="a drafter's file (default: the shipped one)")
    parser.add_argument("--methods", nargs="+", choices=("eagle3", "ngram"), default=["eagle3", "ngram"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--spec-tokens", type=int, default=4)
    parser.add_argument("--limit", type=int, default=20, help="that many prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--vllm-dtype", default="float32")
    parser.add_argument("--threads", type=int, help="in both engines (default: what each of them takes)")
    parser.add_argument("--tolerance", type=float, default=0.05)
    return parser.parse_args()


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    return [prompts[i * len(prompts) // limit] for i in range(min(limit, len(prompts)))]


def drafters(args: argparse.Namespace, model: LoadedModel, folder: Path) -> dict[str, dict[str, Any]]:
    """The drafter, exported in every layout asked for: a configuration that both engines take."""
    network = load_network("eagle3", args.drafter, model.decoder)  # type: ignore[arg-type]
    for layout in args.formats:
        export_eagle3(network, model.config, str(model.path), folder / layout, layout, args.spec_tokens)
    return {layout: {"method": "eagle3", "model": str(folder / layout)} for layout in args.formats}


def run_ours(
    model: LoadedModel, config: dict[str, Any], prompts: list[Prompt], args: argparse.Namespace
) -> tuple[Row, list[list[int]]]:
    config = config | {"num_speculative_tokens": args.spec_tokens, "node_budget": args.spec_tokens}  # a chain
    llm = LLM(model, config, max_num_seqs=1, max_model_len=MAX_MODEL_LEN)
    inputs = [llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    outputs = llm.generate(inputs, SamplingParams(temperature=0.0, max_tokens=args.max_tokens))
    stats = llm.stats()["speculation"][config["method"]]
    row = Row(
        config["method"],
        "Paceline",
        [output.outputs[0].token_ids for output in outputs],
        stats["num_steps"],
        stats["num_drafts"],
        stats["num_draft_tokens"],
        stats["accepted_per_position"],
    )
    return row, [prompt["prompt_token_ids"] for prompt in inputs]


def run_vllm(
    model: LoadedModel,
    config: dict[str, Any],
    layout: str,
    token_ids: list[list[int]],
    args: argparse.Namespace,
    versions: dict[str, str],
) -> Row:
    options = {
        "model": str(model.path),
        "dtype": args.vllm_dtype,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": config | {"num_speculative_tokens": args.spec_tokens},
    }
    job = {"options": options, "prompts": token_ids, "max_tokens": args.max_tokens}
    result = call_peer(args.vllm_python, job, args.threads)
    versions |= result["versions"]
    counters = result["counters"]
    return Row(
        config["method"],
        f"vLLM, {layout}" if layout else "vLLM",
        result["outputs"],
        sum(result["steps"]),
        counters["drafts"],
        counters["draft_tokens"],
        counters["accepted_tokens_per_pos"],
    )


def call_peer(python: str, job: dict[str, Any], threads: int | None) -> dict[str, Any]:
    """vLLM's log goes to standard error; its engine stays in that one process, where its steps can be counted."""
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    if threads is not None:
        environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder) / "job.json", Path(folder) / "result.json"
        job_file.write_text(json.dumps(job))
        command = [python, str(PEER), str(job_file), str(result_file)]
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        result: dict[str, Any] = json.loads(result_file.read_text())
    return result


def report_progress(row: Row) -> None:
    print(f"{row.method}, {row.engine}: {row.tokens_per_pass:.3f} tokens per pass", file=sys.stderr, flush=True)


def ours_of(rows: list[Row], row: Row) -> Row:
    return next(other for other in rows if other.method == row.method and other.engine == "Paceline")


def print_table(rows: list[Row], args: argparse.Namespace) -> None:
    print(
        f"K={args.spec_tokens}, {args.limit} prompts, greedy, {args.max_tokens} tokens; tokens per pass, bonus counted"
    )
    head = ("method", "engine", "tokens", "passes", "per pass", "ratio", "same text")
    print("{:8} {:18} {:>6} {:>6} {:>8} {:>6} {:>9}  accepted by position".format(*head))
    for row in rows:
        ours = ours_of(rows, row)
        same = sum(a == b for a, b in zip(row.outputs, ours.outputs, strict=True))
        by_position = " ".join(f"{count / max(1, row.num_drafts):.3f}" for count in row.accepted_per_position)
        print(
            f"{row.method:8} {row.engine:18} {row.num_tokens:6} {row.num_passes:6} {row.tokens_per_pass:8.3f} "
            f"{row.tokens_per_pass / ours.tokens_per_pass:6.3f} {same:6}/{len(row.outputs):<2}  {by_position}"
        )


if __name__ == "__main__":
    main()
