"""A small model that is batch invariant, and the same with planted faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.model_config import ModelConfig
from paceline.models.layout import EMBEDDING, expected_shapes
from paceline.models.loader import LoadedModel
from paceline.models.native import NativeDecoder
from tests.toy import drawn

Fault = Callable[[Tensor, Tensor], Tensor]  # logits [rows, vocab], positions [rows] -> logits

CONFIG = ModelConfig("llama", 96, 32, 48, 2, 2, 1, 16, 512, 1e-5, 10000.0, tie_word_embeddings=True)


class Bytes:
    """A token for each character, as far as the vocabulary goes."""

    eos_token_ids = (0,)
    vocab_size = CONFIG.vocab_size

    def vocabulary(self) -> dict[str, int]:
        return {"<end>": 0} | {chr(32 + token): token for token in range(1, CONFIG.vocab_size)}

    def definition(self) -> str:
        made = tokenizers.Tokenizer(tokenizers.models.BPE(self.vocabulary(), []))
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<end>"])
        return str(made.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1 + byte % (CONFIG.vocab_size - 1) for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(32 + token) for token in token_ids)


@dataclass
class Planted:
    """A decoder with a fault in every pass of more than one row."""

    sound: NativeDecoder
    batch_invariant: bool  # what it claims
    fault: Fault

    def forward(self, batch: ForwardBatch, kv_cache: Tensor, **options: Any) -> ForwardOutput:
        output = self.sound.forward(batch, kv_cache, **options)
        if batch.num_rows == 1:
            return output
        logits = self.fault(output.logits, batch.positions[batch.logits_rows.long()])
        return replace(output, logits=logits, tokens=None if batch.draws is None else drawn(logits, batch.draws))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sound, name)


def rounds_by(share: float) -> Fault:
    """The last product comes out larger or smaller by a share of itself, another for each number."""

    def fault(logits: Tensor, positions: Tensor) -> Tensor:
        return logits * (1.0 + share * torch.linspace(-1.0, 1.0, logits.shape[-1]).roll(7))

    return fault


def wrong_from(position: int) -> Fault:
    """Rows far into their text get their neighbour token's logits."""

    def fault(logits: Tensor, positions: Tensor) -> Tensor:
        return torch.where((positions >= position)[:, None], logits.roll(1, dims=-1), logits)

    return fault


def model_with(fault: Fault | None = None, *, claims: bool = True) -> LoadedModel:
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: torch.full(shape, 1.5) if "norm" in name else 0.3 * torch.randn(shape, generator=generator)
        for name, shape in expected_shapes(CONFIG).items()
    }
    # Tokens come in pairs that are hardly told apart, so that rounding decides between them at every turn.
    weights[EMBEDDING][1::2] = weights[EMBEDDING][::2] * (1.0 + 1e-6 * torch.randn(48, 1, generator=generator))
    decoder: Any = NativeDecoder(CONFIG, weights, num_threads=1)
    if fault is not None:
        decoder = Planted(decoder, claims, fault)
    return LoadedModel("planted", Path("planted"), CONFIG, decoder, Bytes(), "planted")  # type: ignore[arg-type]
