"""How far each CPU format is from the float32 model that the same file means, under teacher forcing.

    python benchmarks/cpu_fidelity.py PROMPTS.jsonl [--peer-python ENV/bin/python] [--prompts 16]

The reference widens the file's blocks to float32 and computes in float32. Every format then reads the same tokens, and
at each position its distribution is compared with the reference's: the share of positions with the same likeliest
token, and the mean of KL(reference || format). llama.cpp's own run of the file stands beside ours where it is found.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu import Peer
from torch import Tensor

from paceline.bench.run.provenance import provenance
from paceline.core.kv_tensor import allocate_kv
from paceline.core.packing import RequestRows, pack
from paceline.models.aliases import SOURCE_FILE
from paceline.models.decoder import Decoder
from paceline.models.loading import load_config, load_tokenizer, load_weights
from paceline.models.native import NativeDecoder
from paceline.models.resolve import resolve_model

# name -> (dtype of plain weights, quantization, dtype of the KV cache)
FORMATS: dict[str, tuple[torch.dtype, str | None, torch.dtype]] = {
    "native float32": (torch.float32, None, torch.float32),
    "native float16": (torch.float16, None, torch.float16),
    "native bfloat16": (torch.bfloat16, None, torch.bfloat16),
    "native gguf": (torch.float32, "gguf", torch.float32),
    "native gguf, float16 KV": (torch.float16, "gguf", torch.float16),
    "native gguf, int16 KV": (torch.float16, "gguf", torch.int16),
    "native gguf, int8 KV": (torch.float16, "gguf", torch.int8),
    "native int8": (torch.float32, "int8", torch.float32),
}
BLOCK_SIZE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--peer-python", action="append", default=[])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=256, help="of each prompt")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    path = resolve_model(args.model)
    gguf = path / SOURCE_FILE if path.is_dir() else path
    config, tokenizer = load_config(path), load_tokenizer(path)
    blocks = load_weights(gguf, config, keep_quantized=True)
    reference = Decoder(config, blocks)
    decoders = {
        name: NativeDecoder(config, blocks if quantization else load_weights(path, config), dtype=dtype,
                            quantization=quantization, num_threads=args.threads, kv_dtype=kv_dtype)
        for name, (dtype, quantization, kv_dtype) in FORMATS.items()
    }  # fmt: skip
    peer = Peer.start("llama.cpp", [*args.peer_python, sys.executable], path, gguf, args.threads, 2048)
    lines = [json.loads(line) for line in Path(args.file).read_text().splitlines() if line.strip()]
    texts = [lines[i * len(lines) // args.prompts]["turns"][0] for i in range(min(args.prompts, len(lines)))]
    totals: dict[str, list[float]] = {}  # name -> [positions, same top token, sum of KL]
    for text in texts:
        token_ids = tokenizer.encode(text)[: args.max_tokens]
        expected = logits(reference, token_ids)
        for name, decoder in decoders.items():
            compare(totals.setdefault(name, [0.0, 0.0, 0.0]), expected, logits(decoder, token_ids))
        if peer is not None:
            found = peer_logits(peer, token_ids)
            compare(totals.setdefault(f"llama.cpp {peer.version}", [0.0, 0.0, 0.0]), expected, found)
    rows = [
        {"format": name, "positions": int(n), "top_1": same / n, "mean_kl": kl / n}
        for name, (n, same, kl) in totals.items()
    ]
    for row in rows:
        agreement = f"top-1 {row['top_1']:.4f}   mean KL {row['mean_kl']:.6f}"
        print(f"{row['format']:<26} {agreement}   ({row['positions']} positions)")
    print(json.dumps({"fidelity": rows, **provenance(vars(args))}))
    return 0


def logits(decoder: Any, token_ids: list[int]) -> Tensor:
    """After each token, [tokens, vocab]."""
    count, config = len(token_ids), decoder.config
    blocks = -(-count // BLOCK_SIZE)
    batch = pack([RequestRows(range(blocks), token_ids, 0, num_wanted=count)], BLOCK_SIZE)
    cache = allocate_kv(config, blocks * BLOCK_SIZE, decoder.dtype, decoder.device)
    out: Tensor = decoder.forward(batch, cache).logits
    return out


def peer_logits(peer: Peer, token_ids: list[int]) -> Tensor:
    assert peer.process.stdin is not None and peer.process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        target = str(Path(folder) / "logits.npy")
        print(json.dumps({"prompts": [token_ids], "logits_to": target}), file=peer.process.stdin, flush=True)
        answer = json.loads(peer.process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(f"{peer.name} gave no logits: {answer['error']}")
        return torch.from_numpy(np.load(target)).float()


def compare(total: list[float], expected: Tensor, found: Tensor) -> None:
    reference, other = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    total[0] += len(expected)
    total[1] += float((expected.argmax(-1) == found.argmax(-1)).sum())
    total[2] += float((reference.exp() * (reference - other)).sum())


if __name__ == "__main__":
    sys.exit(main())
