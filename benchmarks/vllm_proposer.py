"""Our drafters inside vLLM, beside vLLM's own n-gram and its plain decoding: tokens per pass, tokens per second, text.

    VENV/bin/python benchmarks/vllm_proposer.py spec_bench.jsonl --model FOLDER

Runs in vLLM's own interpreter, where Paceline must be importable (PYTHONPATH, or `pip install --no-deps`). One engine
for each row lives in this process, and every prompt is answered by all of them in turn before the next one comes, so
that a machine that becomes slower becomes slower for all. Greedy, one request at a time: each step of an engine is one
pass for one request. Ends with exit code 1 where a text differs from that of plain decoding.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps are counted in this process

from vllm_peer import answer

from paceline.bench.run.provenance import provenance
from paceline.bench.workloads.workload import Prompt, load_workload

MAX_MODEL_LEN = 2048
KV_BYTES = 256 << 20  # of each engine: room for one request with as many tokens, of a model of this size
PLAIN = "plain"
OURS = {"method": "custom_class", "model": "paceline.vllm_proposer.Proposer"}
ROWS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {  # speculative_config, additional_config
    PLAIN: (None, {}),
    "our ngram": (OURS, {"paceline": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}}),
    "our suffix": (OURS, {"paceline": {"method": "suffix"}}),
    "our merge": (OURS, {"paceline": {"method": "merge"}}),
    # The last one: its numba makes vLLM 0.32 on a CPU fail where a process starts another engine.
    "vLLM ngram": ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}, {}),
}


@dataclass(slots=True)
class Row:
    name: str
    engine: Any
    outputs: list[list[int]] = field(default_factory=list)
    num_passes: int = 0
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))

    def record(self, plain: "Row") -> dict[str, Any]:
        return {
            "row": self.name,
            "tokens": self.num_tokens,
            "passes": self.num_passes,
            "mean_acceptance_length": round(self.num_tokens / self.num_passes, 3),
            "tokens_per_s": round(self.num_tokens / self.seconds, 2),
            "speedup": round(self.num_tokens / self.seconds / (plain.num_tokens / plain.seconds), 3),
            "same_text": sum(a == b for a, b in zip(self.outputs, plain.outputs, strict=True)),
        }


def main() -> None:
    args = parse_arguments()
    import vllm
    from vllm.sampling_params import RequestOutputKind

    rows = [Row(name, engine(args, *ROWS[name])) for name in ROWS if name in (PLAIN, *args.rows)]
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=args.max_tokens, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    tokenizer = rows[0].engine.get_tokenizer()
    prompts = spread(load_workload(args.prompts), args.limit)
    for row in rows:
        answer(row.engine.llm_engine, "warm-up", [1, 2, 3], params)
    for i, prompt in enumerate(prompts):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt.text}], add_generation_prompt=True, tokenize=False
        )
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        for row in rows[i % len(rows) :] + rows[: i % len(rows)]:  # none is always the first
            begin_s = time.perf_counter()
            output, steps = answer(row.engine.llm_engine, str(i), token_ids, params)
            row.seconds += time.perf_counter() - begin_s
            row.outputs.append(output)
            row.num_passes += steps
        print(f"{i + 1} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    records = [row.record(rows[0]) for row in rows]
    print_table(records, len(prompts), args)
    versions = {"vllm": vllm.__version__}
    print(json.dumps({"benchmark": "vllm_proposer", **provenance(vars(args)), "peers": versions, "results": records}))
    sys.exit(any(record["same_text"] < len(prompts) for record in records))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", help="a JSON lines file with category and turns, or categories such as code,chat")
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--rows", nargs="+", choices=[name for name in ROWS if name != PLAIN], default=list(ROWS)[1:])
    parser.add_argument("--spec-tokens", type=int, default=4)
    parser.add_argument("--nodes", type=int, help="of the trees that our chains are chosen from (default: as shipped)")
    parser.add_argument("--limit", type=int, default=20, help="that many prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def engine(args: argparse.Namespace, config: dict[str, Any] | None, additional: dict[str, Any]) -> Any:
    import vllm

    if additional and args.nodes is not None:
        additional = {name: options | {"node_budget": args.nodes} for name, options in additional.items()}
    return vllm.LLM(
        model=args.model,
        dtype=args.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        kv_cache_memory_bytes=KV_BYTES,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=None if config is None else config | {"num_speculative_tokens": args.spec_tokens},
        additional_config=additional,
    )


def spread(prompts: list[Prompt], limit: int) -> list[Prompt]:
    return [prompts[i * len(prompts) // limit] for i in range(min(limit, len(prompts)))]


def print_table(records: list[dict[str, Any]], num_prompts: int, args: argparse.Namespace) -> None:
    print(f"K={args.spec_tokens}, {num_prompts} prompts, greedy, {args.max_tokens} tokens, {args.dtype}")
    print(f"{'':12} {'tokens':>6} {'passes':>6} {'per pass':>8} {'tok/s':>7} {'speedup':>8} {'same text':>10}")
    for r in records:
        print(
            f"{r['row']:12} {r['tokens']:6} {r['passes']:6} {r['mean_acceptance_length']:8.3f} "
            f"{r['tokens_per_s']:7.1f} {r['speedup']:7.2f}x {r['same_text']:7}/{num_prompts}"
        )


if __name__ == "__main__":
    main()
