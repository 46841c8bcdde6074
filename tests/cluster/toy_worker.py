"""A worker process over the toy model: python -m tests.cluster.toy_worker, with the options of a local worker."""

import argparse
import asyncio
import sys
import time
from typing import Any

from paceline.cluster.parent import Parent
from paceline.cluster.worker_main import run_worker
from paceline.llm import AsyncLLM
from paceline.spec.config.speculative_config import at_default_size
from tests.bench.toy_llm import toy_model

OPTIONS: dict[str, Any] = {"max_num_seqs": 8, "num_kv_blocks": 300, "block_size": 4}
METHODS = ["ngram"]


def slow_model(pass_s: float) -> Any:
    """A pass takes as long as this, so that a kill finds it at work."""
    model = toy_model()
    forward = model.decoder.forward

    def slower(*arguments: Any, **options: Any) -> Any:
        time.sleep(pass_s)
        return forward(*arguments, **options)

    model.decoder.forward = slower  # type: ignore[method-assign]
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-name")
    parser.add_argument("--role")
    parser.add_argument("--listen")
    parser.add_argument("--end-with-stdin", action="store_true")
    args = parser.parse_args()
    host, _, port = args.listen.rpartition(":")
    llm = AsyncLLM(slow_model(0.005), at_default_size({"method": "ngram"}), **OPTIONS)
    sys.exit(asyncio.run(run_worker(llm, METHODS, args.role, args.worker_name, host, int(port), Parent())))
