"""A draft model with other tokens: drafts cross over as text, exactly, or the pair is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.errors import InvalidOptionError
from paceline.spec.model.foreign_drafter import check_lossless
from tests.toy import VOCAB, ToyDecoder, ToyTokenizer, run_all, toy_core, toy_request

PAIRS = VOCAB * VOCAB


class PairTokenizer:
    """Two letters to a token where it can, else one; the target has one letter to a token."""

    def vocabulary(self) -> dict[str, int]:
        return {self.decode([token]): token for token in range(VOCAB + PAIRS)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        codes = [ord(letter) - ord("a") for letter in text]
        pairs = [codes[i] * VOCAB + codes[i + 1] + VOCAB for i in range(0, len(codes) - 1, 2)]
        return pairs + (codes[-1:] if len(codes) % 2 else [])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        codes = [c for i in ids for c in ((i,) if i < VOCAB else divmod(i - VOCAB, VOCAB))]
        return "".join(chr(ord("a") + code) for code in codes)


class Stretched(ToyDecoder):
    """The toy target in other tokens: it answers with the two letters that the target would write."""

    config = ToyDecoder.config.__class__(
        **{f: getattr(ToyDecoder.config, f) for f in ToyDecoder.config.__slots__ if f != "vocab_size"},
        vocab_size=PAIRS + VOCAB,
    )

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        slots = batch.slot_mapping.long()
        kv_cache[0, 0, slots, 0, 0] = batch.token_ids.float()
        kv_cache[0, 1, slots, 0, 0] = batch.positions.float()
        rows = []
        for row in batch.logits_rows.tolist():
            letters = PairTokenizer().decode(self._attended(batch, kv_cache, row))
            tokens = ToyTokenizer().encode(letters)
            first = int(self.logits(tokens).argmax())
            second = int(self.logits([*tokens, first]).argmax())
            rows.append(torch.nn.functional.one_hot(torch.tensor(first * VOCAB + second + VOCAB), PAIRS + VOCAB))
        return ForwardOutput(torch.stack(rows).float() if rows else torch.zeros(0, PAIRS + VOCAB))


@dataclass
class Loaded:
    decoder: Any
    tokenizer: Any


@pytest.fixture
def any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy letters cannot spell the real probes."""
    monkeypatch.setattr("paceline.spec.model.foreign_drafter.PROBES", ("abc", "a"))


PROMPTS = [[1, 2, 3], [4], list(range(18)), [7, 8] * 30]


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize("num_blocks", [24, 256], ids=["crowded", "roomy"])
def test_a_twin_in_other_tokens_is_nearly_always_right(num_blocks: int) -> None:
    requests = [toy_request(str(i), p, max_tokens=21, ignore_eos=True) for i, p in enumerate(PROMPTS)]
    model = Loaded(Stretched(), PairTokenizer())
    core = toy_core({"method": "draft_model", "model": model, "num_speculative_tokens": 4}, num_blocks=num_blocks)
    outputs = run_all(core, requests)
    expected = [run_all(toy_core(), [toy_request("x", p, max_tokens=21, ignore_eos=True)])[0] for p in PROMPTS]
    assert outputs == expected
    stats = core.speculator.stats()["draft_model"]
    assert stats["num_drafts"] > 0 and stats["draft_acceptance_rate"] > 0.9


@pytest.mark.usefixtures("any_text")
def test_its_blocks_are_given_back() -> None:
    model = Loaded(Stretched(), PairTokenizer())
    core = toy_core({"method": "draft_model", "model": model}, num_blocks=64)
    drafter = core.speculator.proposers["draft_model"]._drafter  # type: ignore[attr-defined]
    before = len(drafter._free_blocks)
    run_all(core, [toy_request(str(i), p) for i, p in enumerate(PROMPTS)])
    from paceline.spec.proposer import StepContext

    core.speculator.observe(StepContext([], gone=core._gone))
    assert len(drafter._free_blocks) == before and not drafter._mirrors


class OtherTokens(ToyTokenizer):
    def vocabulary(self) -> dict[str, int]:
        return {letter: token + 1 for letter, token in super().vocabulary().items()}


class Lossy(OtherTokens):
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids).upper()


class Gluing(OtherTokens):
    """Drops a leading letter, as tokenizers that add a space in front do."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return super().decode(token_ids) if len(token_ids) > 1 else ""


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize("tokenizer", [Lossy(), Gluing()], ids=["changes text", "pieces do not add up"])
def test_a_tokenizer_that_loses_something_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InvalidOptionError, match="cross over as text, but the draft model's tokenizer makes"):
        toy_core({"method": "draft_model", "model": Loaded(Stretched(), tokenizer)})


@pytest.mark.usefixtures("any_text")
@pytest.mark.parametrize("extra", [{"draft_sampling": "sampled"}, {"draft_sampling": "coupled"}, {"tree_widths": [2]}])
def test_what_text_cannot_carry_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="greedy chains as text"):
        toy_core({"method": "draft_model", "model": Loaded(Stretched(), PairTokenizer()), **extra})


class Narrow(ToyDecoder):
    config = replace(ToyDecoder.config, vocab_size=VOCAB - 1)


def test_a_draft_model_with_fewer_rows_than_its_tokenizer_has_tokens_is_refused() -> None:
    with pytest.raises(InvalidOptionError, match=f"has {VOCAB - 1} rows for a tokenizer of {VOCAB} tokens"):
        toy_core({"method": "draft_model", "model": Loaded(Narrow(), ToyTokenizer())})


def test_real_probes_need_a_real_tokenizer(smollm2: Any) -> None:
    from paceline.models.loading import load_tokenizer

    check_lossless(load_tokenizer(smollm2), "the target's")
