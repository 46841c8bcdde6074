"""What choosing tokens costs beside the target's pass: noise, options and the walk, per step.

    python benchmarks/sampling.py [--vocab 49152] [--repeats 50] [--threads 2] [--forward-ms 8.0 --tree-forward-ms 20.0]
    python benchmarks/sampling.py --model smollm2-135m          # also inside the engine, against its own passes

Every line is one `verify` call on logits that are already there. The two forward times are the measured passes of one
row and of the tree; the last column is the share of that pass. The logits have the profile of the default model's
median row: PROFILE says how far below the best token the n-th best one is. With --model the engine decodes plainly and
with full trees of known tokens, and its own clock says what its passes and its verification took.
"""

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.ops.sampling import NodeRow, choose_tokens
from paceline.verifiers import make_verifier

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_k+top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    "top_p, flat": {"temperature": 4.0, "top_p": 0.99},
}
CONTEXT = 512
PROFILE = [(1, 0.0), (8, -4.0), (114, -8.0), (8749, -16.0), (47222, -25.0), (200000, -30.0)]  # (rank, logit)


def peaked_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:  # [rows, vocab]
    """Random order and some jitter over the typical profile."""
    generator = np.random.default_rng(seed)
    profile = np.interp(np.log(np.arange(1, vocab + 1)), np.log([rank for rank, _ in PROFILE]), [z for _, z in PROFILE])
    values = [generator.permutation(profile + generator.normal(0, 0.3, vocab)) for _ in range(rows)]
    return torch.from_numpy(np.stack(values).astype(np.float32))


def request_of(options: dict[str, Any], vocab: int) -> Request:
    prompt = [(i * 7919) % vocab for i in range(CONTEXT)]
    return Request("benchmark", prompt, SamplingParams(**options), max_tokens=64, seed=1)


def oracle_tree(request: Request, logits: Tensor, num_nodes: int, depth: int) -> DraftTree:
    """A chain of `depth` tokens that will be accepted, and beside it single nodes that will not be."""
    tokens: list[int] = []
    for i in range(depth):
        (token,) = choose_tokens([NodeRow(request, tuple(tokens), i)], logits)
        assert isinstance(token, int)
        tokens.append(token)
    wrong = [(tokens[0] + 1 + i) % logits.shape[1] for i in range(num_nodes - depth)]
    return DraftTree(tokens + wrong, [*range(-1, depth - 1), *[-1] * len(wrong)])


def least_s(call: Callable[[], Any], repeats: int) -> float:
    """The least of many: what the work itself takes, whatever else the machine was doing."""
    call()
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return min(times)


def measure(name: str, rule: str, num_nodes: int, depth: int, arguments: argparse.Namespace) -> float:
    request = request_of(OPTIONS[name], arguments.vocab)
    logits = peaked_logits(1 + num_nodes, arguments.vocab)
    tree = oracle_tree(request, logits, num_nodes, depth) if num_nodes else EMPTY_TREE
    verifier = make_verifier(rule)
    (result,) = verifier.verify([request], [tree], logits)
    if result.error is not None or (rule == "sample_match" and len(result.accepted) != depth):
        raise SystemExit(f"{name}: expected {depth} accepted nodes, got {result}")
    return least_s(lambda: verifier.verify([request], [tree], logits), arguments.repeats)


def measure_engine(model: str, name: str, nodes: int, depth: int) -> dict[str, Any]:
    """Seconds per step that the engine spent in its passes and in verification."""
    from paceline import LLM

    llm = LLM(model, {"method": "none"}, max_model_len=256)
    params = SamplingParams(**OPTIONS[name], seed=1, max_tokens=48, ignore_eos=True)
    prompt = "The history of the bicycle begins"
    (plain,) = llm.generate(prompt, params)
    if nodes:
        truth = [plain.prompt_token_ids + plain.outputs[0].token_ids]
        shape = [nodes - depth + 1] + [1] * (depth - 1)
        oracle = {"method": "oracle", "sequences": truth, "shape": shape, "num_speculative_tokens": depth}
        llm = LLM(llm.engine.model, oracle | {"node_budget": nodes}, max_model_len=256)
        llm.generate(prompt, params)
    before = llm.stats()
    llm.generate(prompt, params)
    after = llm.stats()
    steps = after["num_steps"] - before["num_steps"]
    spent = {phase: after["step_seconds"][phase] - before["step_seconds"][phase] for phase in ("execute", "verify")}
    return {"options": name, "nodes": nodes, **{f"{phase}_s": seconds / steps for phase, seconds in spent.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--depth", type=int, default=4, help="accepted nodes of the tree")
    parser.add_argument("--forward-ms", type=float, default=8.0, help="pass of one row")
    parser.add_argument("--tree-forward-ms", type=float, default=20.0, help="pass of the tree")
    parser.add_argument("--model", help="measure inside the engine too, with this model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    print(f"{'options':14} {'rule':13} {'nodes':>5} {'accepted':>8} {'verify ms':>10} {'of the pass':>12}")
    cases = [(name, "sample_match", nodes) for nodes in (0, arguments.nodes) for name in OPTIONS]
    cases += [(name, "multi_step", arguments.nodes) for name in ("sampled", "top_p")]
    for name, rule, nodes in cases:
        depth = arguments.depth if nodes else 0
        seconds = measure(name, rule, nodes, depth, arguments)
        share = seconds * 1e3 / (arguments.tree_forward_ms if nodes else arguments.forward_ms)
        print(f"{name:14} {rule:13} {nodes:5} {depth:8} {seconds * 1e3:10.3f} {share:11.1%}")
        rows.append({"options": name, "rule": rule, "nodes": nodes, "accepted": depth, "verify_s": seconds})
    engine_rows = []
    if arguments.model:
        print(f"\n{'options':14} {'nodes':>5} {'pass ms':>10} {'verify ms':>10} {'of the pass':>12}   in the engine")
        for nodes in (0, arguments.nodes):
            for name in ("greedy", "sampled", "top_p", "penalties"):
                row = measure_engine(arguments.model, name, nodes, arguments.depth)
                engine_rows.append(row)
                share = row["verify_s"] / row["execute_s"]
                times = f"{row['execute_s'] * 1e3:10.2f} {row['verify_s'] * 1e3:10.3f} {share:11.1%}"
                print(f"{name:14} {nodes:5} {times}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "benchmark": "sampling",
        "commit": commit.stdout.strip(),
        "arguments": vars(arguments),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "machine": {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
        "rows": rows,
        "engine_rows": engine_rows,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
