"""Paceline beside llama.cpp, OpenVINO GenAI and transformers on this machine's CPU: same file, same prompts, greedy.

    python benchmarks/cpu.py PROMPTS.jsonl [--peer-python ENV/bin/python] [--prompts 8] [--tokens 64] [--rounds 2]
    python benchmarks/cpu.py PROMPTS.jsonl --context 6000 --prompts 2 --batch 1 --peers openvino     long contexts
    python benchmarks/cpu.py PROMPTS.jsonl --model qwen2.5-coder-1.5b --prompts 3 --tokens 48 --rounds 1 --batch 1 \
        --peers llama.cpp openvino --methods auto                                                 a larger model
    python benchmarks/cpu.py PROMPTS.jsonl --model qwen2.5-coder-1.5b --also awq=FOLDER gptq=FOLDER --context 256 \
        --prompts 3 --tokens 48 --rounds 1 --batch 1 --peers openvino --methods                   other formats of it

PROMPTS.jsonl has Spec-Bench's form: {"turns": ["first question", ...]} per line. Peers are used where the given
interpreter (or this one) can import them; each runs in its own process and sides take turns prompt by prompt, because
machines drift. Prints medians with quartiles, each goal with its verdict, and then one JSON line.

Decode speed counts the tokens after the first over the time after the first. At batch 8 it is all tokens over all time.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from paceline import LLM, SamplingParams
from paceline.bench.run.provenance import provenance
from paceline.models.aliases import SOURCE_FILE
from paceline.models.loader import LoadedModel, load_model
from paceline.models.native import NativeDecoder
from paceline.ops import native

PEERS = ("llama.cpp", "openvino", "transformers")
Sample = dict[str, float]  # ttft_s, total_s, num_tokens


class Peer:
    """A peer engine behind benchmarks/cpu_peers.py; None from `start` where it cannot be had."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", ready: dict[str, Any]) -> None:
        self.name, self.process, self.version, self.batches = name, process, ready["version"], ready["batches"]

    @staticmethod
    def start(name: str, pythons: list[str], model: Path, gguf: Path, threads: int, max_context: int) -> "Peer | None":
        script = str(Path(__file__).with_name("cpu_peers.py"))
        for python in pythons:
            process = subprocess.Popen(
                [python, script, name, str(model), str(gguf), str(threads), str(max_context)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline() or '{"error": "it died"}')
            if "error" not in ready:
                return Peer(name, process, ready)
            print(f"{name} not from {python}: {ready['error'].splitlines()[0]}", file=sys.stderr)
        return None

    def run(self, prompts: list[list[int]], max_tokens: int, lookup: bool) -> Sample | None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(
            json.dumps({"prompts": prompts, "max_tokens": max_tokens, "lookup": lookup}),
            file=self.process.stdin,
            flush=True,
        )
        answer = json.loads(self.process.stdout.readline() or '{"error": "it died"}')
        if "error" in answer:
            print(f"{self.name} failed: {answer['error'].splitlines()[0]}", file=sys.stderr)
            return None
        return {key: float(value) for key, value in answer.items()}


class Ours:
    """A new engine for every run: a drafter that remembers past answers must not meet the same prompt again."""

    def __init__(self, model: LoadedModel, config: dict[str, Any]) -> None:
        self.model, self.config = model, config

    def run(self, prompts: list[list[int]], max_tokens: int) -> Sample:
        llm = LLM(self.model, self.config, enable_prefix_caching=False)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        metrics = [output.metrics for output in outputs if output.metrics is not None]
        return {
            "ttft_s": max(m.ttft_s or 0.0 for m in metrics),
            "total_s": max(m.e2e_s or 0.0 for m in metrics),
            "num_tokens": float(sum(m.num_output_tokens for m in metrics)),
        }


def main() -> int:
    args = parse_arguments()
    model = LLM(args.model, {"method": "none"}, num_threads=args.threads, enable_prefix_caching=False)
    loaded = model.engine.model
    decoder = loaded.decoder
    assert isinstance(decoder, NativeDecoder), "this benchmark measures the native kernels; build them first"
    prompts = read_prompts(args, model)
    bandwidth = native.measure_bandwidth(args.threads)
    limit = bandwidth / decoder.weight_bytes
    gguf = loaded.path / SOURCE_FILE if loaded.path.is_dir() else loaded.path
    sides: dict[str, Any] = {"paceline": Ours(loaded, {"method": "none"})}
    for method in args.methods:
        size = {} if method == "auto" else {"num_speculative_tokens": args.spec_tokens}
        sides[f"paceline {method}"] = Ours(loaded, {"method": method, **size})
    for name, _, folder in (text.partition("=") for text in args.also):
        sides[f"paceline {name}"] = Ours(load_model(folder, num_threads=args.threads), {"method": "none"})
    pythons = [*args.peer_python, sys.executable]
    longest = max(2048, max(map(len, prompts)) + args.tokens + 64)  # drafts reach beyond the end
    peers = [Peer.start(name, pythons, loaded.path, gguf, args.threads, longest) for name in args.peers]
    found = [peer for peer in peers if peer is not None]
    for peer in found:
        sides[peer.name], sides[f"{peer.name} lookup"] = peer, peer
    single = measure(sides, [[ids] for ids in prompts], args)
    crowd = measure(batching_sides(sides), chunks(prompts, args.batch), args) if args.batch > 1 else {}
    print(f"weights {decoder.weight_bytes / 1e6:.0f} MB, memory {bandwidth / 1e9:.1f} GB/s: at most {limit:.0f} tok/s")
    report(single, crowd, args.batch)
    goals = judge(single, crowd, args.batch)
    print(
        json.dumps(
            {
                **({f"batch_{args.batch}": crowd} if args.batch > 1 else {}),
                "batch_1": single,
                "goals": goals,
                "limit_tok_s": limit,
                "execution": loaded.execution,
                "peers": {peer.name: peer.version for peer in found},
                **provenance(vars(args)),
            }
        )
    )
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peer-python", action="append", default=[], help="interpreter with peers; may repeat")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--also", nargs="*", default=[], metavar="NAME=FOLDER", help="the model in other formats")
    parser.add_argument("--methods", nargs="*", default=["ngram"], help="drafting methods of our side")
    parser.add_argument("--context", type=int, help="prompts of so many tokens: texts of the file, one after the other")
    parser.add_argument("--spec-tokens", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def read_prompts(args: argparse.Namespace, llm: LLM) -> list[list[int]]:
    """Prompts spread evenly over the file, as the model's chat template wants them."""
    lines = [json.loads(line) for line in Path(args.file).read_text().splitlines() if line.strip()]
    if args.context is not None:
        return long_prompts(args, llm, [line["turns"][0] for line in lines])
    chosen = [lines[i * len(lines) // args.prompts] for i in range(min(args.prompts, len(lines)))]
    return [
        llm.chat_prompt([{"role": "user", "content": line["turns"][0]}])["prompt_token_ids"][:1024] for line in chosen
    ]


def long_prompts(args: argparse.Namespace, llm: LLM, texts: list[str]) -> list[list[int]]:
    """Prompts of `--context` tokens with nothing in common: texts in the file's order, then a request to sum up."""
    question = "\n\nSummarize the texts above, in their own words.\n\nSummary:"
    ends = llm.get_tokenizer().encode(question)
    pool = [token for text in texts for token in llm.get_tokenizer().encode(text + "\n\n")]
    size = args.context - len(ends)
    if size < 1 or size * args.prompts > len(pool):
        raise SystemExit(
            f"the file has {len(pool)} tokens, too few for {args.prompts} prompts of {args.context}: give fewer, "
            "shorter ones or another file"
        )
    return [pool[i * size : (i + 1) * size] + ends for i in range(args.prompts)]


def chunks(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    padded = prompts * -(-size // len(prompts))
    return [padded[i : i + size] for i in range(0, max(1, len(prompts) - size + 1), size)]


def batching_sides(sides: dict[str, Any]) -> dict[str, Any]:
    return {
        name: side
        for name, side in sides.items()
        if isinstance(side, Ours) or (side.batches and not name.endswith("lookup"))
    }


def measure(sides: dict[str, Any], work: list[list[list[int]]], args: argparse.Namespace) -> dict[str, Any]:
    """Every side over every piece of work, in turns; the first piece once more beforehand to warm up."""
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    names = list(sides)
    for turn, prompts in enumerate([work[0], *work * args.rounds]):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            side = sides[name]
            if isinstance(side, Ours):
                sample: Sample | None = side.run(prompts, args.tokens)
            else:
                sample = side.run(prompts, args.tokens, name.endswith("lookup"))
            if turn and sample is not None:
                samples[name].append(sample)
    return {name: summarize(found, len(work[0])) for name, found in samples.items() if found}


def summarize(samples: list[Sample], batch: int) -> dict[str, Any]:
    def rate(sample: Sample) -> float:
        if batch > 1:
            return sample["num_tokens"] / sample["total_s"]
        return (sample["num_tokens"] - 1) / max(sample["total_s"] - sample["ttft_s"], 1e-9)

    rates, firsts = sorted(map(rate, samples)), sorted(sample["ttft_s"] for sample in samples)
    quartiles = statistics.quantiles(rates, n=4) if len(rates) > 1 else [rates[0]] * 3
    return {
        "tok_s": statistics.median(rates),
        "tok_s_quartiles": [quartiles[0], quartiles[2]],
        "ttft_s": statistics.median(firsts),
        "runs": len(samples),
    }


def report(single: dict[str, Any], crowd: dict[str, Any], batch: int) -> None:
    for title, results in (("batch 1", single), (f"batch {batch}", crowd)):
        for name, result in results.items():
            low, high = result["tok_s_quartiles"]
            print(
                f"{title:<9} {name:<22} {result['tok_s']:8.1f} tok/s  [{low:.1f}, {high:.1f}]  "
                f"first token {result['ttft_s'] * 1e3:7.1f} ms  ({result['runs']} runs)"
            )


def judge(single: dict[str, Any], crowd: dict[str, Any], batch: int) -> list[dict[str, Any]]:
    """Our figures over the best peer's, with what was aimed at."""
    peer_plain = {n: r for n, r in single.items() if not n.startswith("paceline") and not n.endswith("lookup")}
    peer_all = {n: r for n, r in single.items() if not n.startswith("paceline")}
    ours = {n: r for n, r in single.items() if n.startswith("paceline")}
    goals: list[tuple[str, float, float]] = []
    if peer_all:
        best = max(r["tok_s"] for r in peer_plain.values())
        goals.append(("plain decode over the best peer's", ours["paceline"]["tok_s"] / best, 1.5))
        best = max(r["tok_s"] for r in peer_all.values())
        goals.append(
            ("our best mode over the best peer's best mode", max(r["tok_s"] for r in ours.values()) / best, 1.5)
        )
        first = min(r["ttft_s"] for r in peer_plain.values())
        goals.append(("best peer's time to first token over ours", first / ours["paceline"]["ttft_s"], 1.0))
    crowd_peers = [r["tok_s"] for n, r in crowd.items() if not n.startswith("paceline")]
    if crowd_peers:
        best_ours = max(r["tok_s"] for n, r in crowd.items() if n.startswith("paceline"))
        goals.append((f"{batch} requests together over the best peer that batches", best_ours / max(crowd_peers), 2.0))
    for what, value, goal in goals:
        print(f"{what:<58} {value:6.2f}x  goal {goal}x  {'ok' if value >= goal else 'MISSED'}")
    return [{"what": what, "value": value, "goal": goal, "reached": value >= goal} for what, value, goal in goals]


if __name__ == "__main__":
    sys.exit(main())
