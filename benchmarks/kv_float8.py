"""What keys and values in FP8 lose beside bfloat16, with and without scales, on the plain twin of the CUDA kernels.

    python benchmarks/kv_float8.py [--model smollm2-135m] [--passages 3]

The model is computed in float32 by PyTorch on a CPU. Only what is stored of keys and values differs: it is rounded to
bfloat16 (the reference), to FP8 as `kv_cache_dtype="fp8"` does it, to FP8 under a scale, or to int8 under a scale.
Held-out text: prompts of ours (`bench/run/passages.py`) with the model's own answers. Prints a table and one JSON line.
"""

import argparse
import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from paceline import LLM
from paceline.bench.run.passages import HELD_OUT, passages
from paceline.bench.run.provenance import provenance
from paceline.core.agreement import Agreement, Passage
from paceline.core.forward import Target
from paceline.core.kv_tensor import FLOAT8_LARGEST, allocate_kv, as_float8
from paceline.core.packing import RequestRows, pack
from paceline.models.loader import load_model
from paceline.ops import reference

BLOCK_SIZE = 16
Rounding = Callable[[Tensor], Tensor]


def bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def float8(x: Tensor) -> Tensor:
    return as_float8(bfloat16(x)).float()


def float8_scaled(x: Tensor) -> Tensor:
    """A float32 scale for each head of a position."""
    scale = _largest(x) / FLOAT8_LARGEST
    return as_float8(bfloat16(x) / scale).float() * scale


def int8_scaled(x: Tensor) -> Tensor:
    scale = _largest(x) / 127
    return torch.round(x / scale) * scale


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).clamp(min=1e-12)


ROUNDINGS: dict[str, tuple[Rounding, Rounding]] = {  # of keys, of values
    "fp8": (float8, float8),
    "fp8, keys only": (float8, bfloat16),
    "fp8, values only": (bfloat16, float8),
    "fp8, a scale a head": (float8_scaled, float8_scaled),
    "int8, a scale a head": (int8_scaled, int8_scaled),
}


def logits_of(decoder: Target, passage: Passage, rounds_key: Rounding, rounds_value: Rounding) -> Tensor:
    def write(key: Tensor, value: Tensor, kv_layer: Tensor, slot_mapping: Tensor) -> None:
        kv_layer[0].index_copy_(0, slot_mapping.long(), rounds_key(key))
        kv_layer[1].index_copy_(0, slot_mapping.long(), rounds_value(value))

    original, reference.write_kv = reference.write_kv, write
    try:
        num_tokens = len(passage.token_ids)
        blocks = list(range(-(-num_tokens // BLOCK_SIZE)))
        cache = allocate_kv(decoder.config, len(blocks) * BLOCK_SIZE, torch.float32, decoder.device)
        rows = RequestRows(blocks, passage.token_ids, 0, num_wanted=num_tokens)
        return decoder.forward(pack([rows], BLOCK_SIZE), cache).logits
    finally:
        reference.write_kv = original


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--passages", type=int, default=3)
    args = parser.parse_args()
    texts = passages(LLM(args.model, {"method": "none"}, max_model_len=2048), HELD_OUT, args.passages)
    decoder = load_model(args.model, kernels="torch", dtype="float32", device="cpu", quiet=True).decoder
    found = {name: Agreement() for name in ROUNDINGS}
    for text in texts:
        expected = logits_of(decoder, text, bfloat16, bfloat16)
        for name, rounding in ROUNDINGS.items():
            found[name].add(expected, logits_of(decoder, text, *rounding), text.next_ids())
    print(f"{'':24}{'KL, nats':>10}{'same top':>10}{'perplexity':>12}{'bfloat16':>10}")
    for name, one in found.items():
        figures = f"{one.divergence:10.5f}{one.same_top:10.1%}{one.perplexity:12.3f}{one.reference_perplexity:10.3f}"
        print(f"{name:24}{figures}")
    print(json.dumps({"kv_float8": {name: one.to_dict() for name, one in found.items()}, **provenance(vars(args))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
