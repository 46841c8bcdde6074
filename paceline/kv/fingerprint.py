"""What makes the KV of two engines interchangeable, bit for bit.

Keys and values may go from one engine to another, or be read from a disk, where both computed them alike: the same
weights, the same kernels and instruction set, the same layout. A fingerprint names all of these. Its last part is the
bits that a fixed pass gave here, so that a difference nobody thought of shows too.

>>> mine = make_fingerprint(decoder, weights="4f1c...", block_size=16)
>>> mine.differences(yours)
['instruction set']
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.forward import Target
from paceline.core.kv_tensor import allocate_kv, raw
from paceline.core.packing import RequestRows, pack
from paceline.errors import InvalidRequestError
from paceline.kv.hashes import HASH_BYTES
from paceline.ops import native
from paceline.ops.native.library import library_sha256

FORMAT = "1"  # of a block's bytes (block_bytes.py), and of this file's own parts
PROBE_STEP = 7919  # a prime: the probe's tokens lie all over the vocabulary
PARTS = ("format", "weights", "config", "kv dtype", "layout", "block size", "kernels", "instruction set", "probe")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    parts: Mapping[str, str]  # of `PARTS`

    @property
    def digest(self) -> bytes:
        text = json.dumps([self.parts[name] for name in PARTS])
        return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).digest()

    def differences(self, other: "Fingerprint") -> list[str]:
        """Names of the parts that differ: why neither may use the other's KV."""
        return [name for name in PARTS if self.parts[name] != other.parts[name]]

    def to_dict(self) -> dict[str, str]:
        return dict(self.parts)

    @staticmethod
    def from_dict(parts: Mapping[str, object]) -> "Fingerprint":
        """Raises for what `to_dict` did not make."""
        wrong = [name for name in PARTS if not isinstance(parts.get(name), str)]
        if wrong:
            raise InvalidRequestError(f"this is no fingerprint: it has no text as its {', '.join(wrong)}")
        return Fingerprint({name: str(parts[name]) for name in PARTS})


def make_fingerprint(decoder: Target, weights: str, block_size: int) -> Fingerprint:
    """`weights`: a digest of the files that the decoder was made of. Runs one pass: only in the engine's thread."""
    config = decoder.config
    is_native = decoder.handle is not None
    values = (
        FORMAT,
        weights,
        json.dumps(dataclasses.asdict(config), sort_keys=True),
        str(decoder.dtype),
        str([config.num_layers, 2, block_size, config.num_kv_heads, config.head_dim]),
        str(block_size),
        f"native {library_sha256()}" if is_native else _torch_kernels(decoder),
        native.instruction_set() if is_native else _device(decoder.device),
        probe(decoder, block_size),
    )
    return Fingerprint(dict(zip(PARTS, values, strict=True)))


@torch.no_grad()
def probe(decoder: Target, block_size: int) -> str:
    """A digest of the logits, keys and values of a fixed pass."""
    config = decoder.config
    num_tokens = min(2 * block_size + 1, config.max_position)
    tokens = [PROBE_STEP * (i + 1) % config.vocab_size for i in range(num_tokens)]
    blocks = range(-(-num_tokens // block_size))
    kv_cache = allocate_kv(config, len(blocks) * block_size, decoder.dtype, decoder.device)
    batch = pack([RequestRows(blocks, tokens, start=0, num_wanted=num_tokens)], block_size)
    output = decoder.forward(batch, kv_cache)
    found = hashlib.blake2b(digest_size=HASH_BYTES)
    for tensor in (output.logits, raw(kv_cache)[:, :, :num_tokens]):
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _torch_kernels(decoder: Target) -> str:
    """Sums of PyTorch's own kernels on a CPU depend on the number of threads; invariant kernels do not."""
    threads = torch.get_num_threads() if decoder.device.type == "cpu" and not decoder.batch_invariant else None
    return f"{type(decoder).__name__} torch {torch.__version__} invariant {decoder.batch_invariant} threads {threads}"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
    return str(torch.backends.cpu.get_cpu_capability())
