"""A worker whose passes last as long as a formula says, whatever else the machine does: tiny weights, and a sleep.

    python benchmarks/sleeping_worker.py MODEL_FOLDER, with the options of a local worker

What it shows is how near the simulator is to the real scheduler, routers and transport, apart from how well the cost of
a pass is known.
"""

import argparse
import sys
import time
from typing import Any

from paceline.cluster.event_loop import run
from paceline.cluster.parent import Parent
from paceline.cluster.worker_main import run_worker
from paceline.llm import AsyncLLM
from paceline.models.loader import load_model

FIXED_S, ROW_S = 0.012, 0.0008


def sleeping(model: Any) -> Any:
    forward = model.decoder.forward

    def slower(batch: Any, *arguments: Any, **options: Any) -> Any:
        end_s = time.perf_counter() + FIXED_S + ROW_S * batch.num_rows
        output = forward(batch, *arguments, **options)
        time.sleep(max(0.0, end_s - time.perf_counter()))
        return output

    model.decoder.forward = slower
    return model


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    for option in ("--worker-name", "--role", "--listen"):
        parser.add_argument(option, required=True)
    parser.add_argument("--end-with-stdin", action="store_true")
    args = parser.parse_args()
    parent = Parent()
    host, _, port = args.listen.rpartition(":")
    model = sleeping(load_model(args.folder, quiet=True, num_threads=1))
    llm = AsyncLLM(model, {"method": "none"}, max_num_seqs=64, num_kv_blocks=2000, max_token_delay_s=0.02)
    return run(run_worker(llm, [], args.role, args.worker_name, host, int(port), parent))


if __name__ == "__main__":
    sys.exit(main())
