"""What a prompt and the rows after it cost with keys and values of each format, on the native kernels.

    python benchmarks/kv_formats.py [--contexts 512 2048 6000] [--threads 1] [--formats float16 int16]

Formats take turns chunk by chunk and row count by row count; the least of `--repeats` times counts. With one thread it
is processor time, which other programs on the machine hardly change. Prints the first format's time and the others'
share of it, and one JSON line.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch

from paceline.bench.run.provenance import provenance
from paceline.core.kv_tensor import allocate_kv
from paceline.core.packing import RequestRows, pack
from paceline.models.loader import LoadedModel, load_model

BLOCK_SIZE, CHUNK, ROWS = 16, 512, (1, 4, 16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--formats", nargs="+", default=["float16", "int16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    options: dict[str, Any] = {"device": "cpu", "kernels": "native", "num_threads": args.threads, "quiet": True}
    models = {name: load_model(args.model, kv_cache_dtype=name, **options) for name in args.formats}
    rows = []
    for context in args.contexts:
        for what, seconds in measure(models, context, args.threads, args.repeats).items():
            first = seconds[args.formats[0]]
            shares = "   ".join(f"{name} {seconds[name] / first:.3f}" for name in args.formats[1:])
            print(f"{context:>6} tokens, {what:<8} {args.formats[0]} {1e3 * first:>9.1f} ms   {shares}", flush=True)
            rows.append({"context": context, "what": what, "seconds": seconds})
    print(json.dumps({"kv_formats": rows, **provenance(vars(args))}))
    return 0


def measure(models: dict[str, LoadedModel], context: int, threads: int, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of the prompt, and of some rows after it, for each format."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    num_blocks = -(-(context + max(ROWS)) // BLOCK_SIZE)
    token_ids = torch.randint(10, 1000, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    decoders = {name: model.decoder for name, model in models.items()}
    caches = {
        name: allocate_kv(decoder.config, num_blocks * BLOCK_SIZE, decoder.dtype, decoder.device)
        for name, decoder in decoders.items()
    }

    def least(token_ids: list[int], position: int, repeats: int) -> dict[str, float]:
        batch = pack([RequestRows(range(num_blocks), token_ids, position, num_wanted=1)], BLOCK_SIZE)
        best = dict.fromkeys(decoders, float("inf"))
        for _ in range(repeats):
            for name, decoder in decoders.items():
                begin = clock()
                decoder.forward(batch, caches[name])
                best[name] = min(best[name], clock() - begin)
        return best

    chunks = [least(token_ids[begin : begin + CHUNK], begin, repeats) for begin in range(0, context, CHUNK)]
    found = {"prompt": {name: sum(chunk[name] for chunk in chunks) for name in decoders}}
    return found | {f"{n} rows": least(token_ids[:n], context, 5 * repeats) for n in ROWS}


if __name__ == "__main__":
    sys.exit(main())
