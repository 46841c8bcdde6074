"""When does it pay to compute prompts apart? Simulated, on four workers, by prompt length, bandwidth, hits and drafts.

    python benchmarks/crossover.py [--machine cpu|h200] [--requests 150] [--plot docs/crossover_cpu.svg]

For each kind of load the highest rate is searched at which both targets hold: first tokens within FIRST lone prompts
(p99), gaps within GAP passes of eight streams (p99). A cell is the rate of the best split (1 + 3, 2 + 2 or 3 + 1
workers, policy `cost`) over that of four mixed workers, whose chunks are as short as the gap target wants. Above 1,
disaggregation pays.

Nothing is timed: the pass costs are those of docs/gpu.md and LLM_SERVING.md, the rest is arithmetic; what a long
context adds to a row is left out. Prints a table, then one JSON line.
"""

import argparse
import json
from dataclasses import dataclass
from typing import Any

from paceline.bench.run.provenance import provenance
from paceline.cli.lab import format_table
from paceline.cluster.capacity import capacity
from paceline.cluster.prefill_time import PrefillTime
from paceline.cluster.simulate.run import Fleet, simulate
from paceline.cluster.simulate.trace import Synthetic
from paceline.cluster.worker_spec import WorkerSpec
from paceline.lab.charts import HeatMap, check_plot, save
from paceline.lab.pass_cost import PassCost

FIRST, GAP, STREAMS = 8.0, 2.0, 8
WORKERS, OUTPUT, STEPS = 4, 128, 6  # steps of the search: a rate is known to 1 / 2**STEPS of its range
CURVES = {  # seconds by rows, SmolLM2-135M
    "cpu": {1: 5.9e-3, 4: 6.9e-3, 8: 8.1e-3, 16: 12.0e-3, 32: 21.2e-3, 64: 38.7e-3},
    "h200": {
        1: 0.77e-3,
        8: 0.79e-3,
        16: 0.83e-3,
        32: 0.95e-3,
        64: 1.21e-3,
        128: 1.80e-3,
        256: 2.69e-3,
        512: 3.18e-3,
        1024: 4.53e-3,
    },
}
PROMPTS = (128, 512, 2048, 8000)
GIGABITS = (1.0, 10.0, 100.0)
HIT_RATES = (0.0, 0.75)
DRAFTS = {"plain": (1.0, 1), "2.5 tokens a pass": (2.5, 5)}  # tokens per pass, rows per stream


@dataclass(frozen=True, slots=True)
class Load:
    prompt: int
    hit_rate: float
    requests: int

    def at(self, rate: float) -> Synthetic:
        prefix = int(self.hit_rate * self.prompt)
        groups = 4 if prefix else 0
        return Synthetic(self.requests, rate, self.prompt, OUTPUT, spread=0.3, groups=groups, prefix=prefix)


def best_rate(load: Load, spec: WorkerSpec, fleet: Fleet) -> float:
    """Requests per second at which both targets still hold; 0: at none that was tried."""
    time = PrefillTime(spec.replace(max_token_delay_s=None))
    ttft_s = FIRST * time.prompt_s(load.prompt).seconds + 10 * time.rows_s(STREAMS, 0)
    gap_s = GAP * time.rows_s(STREAMS, 0)
    # no worker reads a prompt in less than its misses take
    low, high = 0.0, WORKERS * 1.2 * capacity(spec, load.prompt, OUTPUT, load.hit_rate)
    for _ in range(STEPS):
        rate = (low + high) / 2
        outcome = simulate(load.at(rate).trace(), fleet)
        low, high = (rate, high) if outcome.meets(ttft_s, gap_s) else (low, rate)
    return low


def cells(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for hit_rate in HIT_RATES:
        for drafts, (tokens, nodes) in DRAFTS.items():
            known: dict[int, float] = {}  # mixed workers send nothing: their rate does not depend on the link
            for gigabits in GIGABITS:
                row: dict[str, Any] = {"hits": f"{hit_rate:.0%}", "drafts": drafts, "Gbit/s": gigabits}
                for prompt in PROMPTS:
                    load = Load(prompt, hit_rate, args.requests)
                    base = spec_of(args.machine, gigabits, tokens, nodes)
                    if prompt not in known:
                        known[prompt] = best_rate(load, base, Fleet(mixed(base), WORKERS))
                    apart = max(best_rate(load, base, split(base, count)) for count in range(1, WORKERS))
                    row[str(prompt)] = apart / known[prompt] if known[prompt] else None
                rows.append(row)
                print(row, flush=True)
    return rows


def spec_of(machine: str, gigabits: float, tokens_per_pass: float, rows_per_stream: int) -> WorkerSpec:
    return WorkerSpec(
        machine,
        PassCost.of(CURVES[machine]),
        max_num_batched_tokens=512 if machine == "cpu" else 2048,
        max_token_delay_s=None,
        num_kv_blocks=20_000 if machine == "cpu" else 200_000,
        bandwidth=gigabits * 1e9 / 8,
        tokens_per_pass=tokens_per_pass,
        rows_per_stream=rows_per_stream,
    )


def mixed(spec: WorkerSpec) -> WorkerSpec:
    """Passes have as many rows, prompts included, as the gap target allows."""
    # a little less than the target: gaps are counted in bins of 1.2 %
    limit_s, curve = 0.98 * GAP * PrefillTime(spec).rows_s(STREAMS, 0), spec.pass_cost
    most = max(rows for rows in range(1, spec.max_num_batched_tokens + 1) if curve(rows) <= limit_s)
    return spec.replace(max_num_batched_tokens=most)


def split(spec: WorkerSpec, num_prefill: int) -> Fleet:
    """A decode worker may still read a prompt itself, in as short chunks as a mixed one: the policy decides."""
    return Fleet(mixed(spec), WORKERS - num_prefill, spec, num_prefill)


def plot(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    names = [f"{row['Gbit/s']:g} Gbit/s, {row['hits']} hits, {row['drafts']}" for row in rows]
    columns = [str(prompt) for prompt in PROMPTS]
    values = [[row[column] for column in columns] for row in rows]
    title = f"Rate of the best split over that of four mixed workers ({args.machine})"
    save(HeatMap(title, "prompt tokens", "", columns, names, values), args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=CURVES, default="cpu")
    parser.add_argument("--requests", type=int, default=150, help="of each simulated run")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    if args.plot:
        check_plot(args.plot)
    rows = cells(args)
    print(format_table(rows))
    if args.plot:
        plot(rows, args)
    print(json.dumps({"rows": rows, **provenance(vars(args))}))


if __name__ == "__main__":
    main()
