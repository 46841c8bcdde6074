"""What a drafter learns from: prompts, each with an answer that the target itself wrote.

All tokens lie in one flat array, so a corpus of millions of tokens is one small file and fits on the device whole. A
share of the prompts is held out: all answers to one prompt land on the same side, so that the acceptance reported on
held-out prompts is about prompts that the drafter never saw.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from torch import Tensor

from paceline.errors import InvalidOptionError

LENGTH_STEP = 64  # batches are padded to a multiple of this, so that few shapes occur


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of similar length, padded on the right with token 0."""

    tokens: Tensor  # [sequences, positions] int64
    lengths: Tensor  # [sequences]
    prompt_lengths: Tensor  # [sequences]

    def is_answer(self, shift: int = 0) -> Tensor:
        """[sequences, positions] bool: the token `shift` places to the right is there and belongs to the answer."""
        index = torch.arange(shift, shift + self.tokens.shape[1], device=self.tokens.device)
        return (index >= self.prompt_lengths[:, None]) & (index < self.lengths[:, None])

    def shifted(self, shift: int) -> Tensor:
        """[sequences, positions]: the token `shift` places to the right; 0 past the end"""
        moved = torch.zeros_like(self.tokens)
        if shift < self.tokens.shape[1]:
            moved[:, : self.tokens.shape[1] - shift] = self.tokens[:, shift:]
        return moved


@dataclass(frozen=True, slots=True)
class Corpus:
    tokens: NDArray[np.int32]  # every sequence, one after the other
    offsets: NDArray[np.int64]  # [sequences + 1]
    prompt_lengths: NDArray[np.int32]  # [sequences]
    temperatures: NDArray[np.float32]  # [sequences]: how the answer was sampled

    @staticmethod
    def build(
        prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], temperatures: Sequence[float]
    ) -> "Corpus":
        lengths = [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)]
        parts = [np.asarray(part, dtype=np.int32) for both in zip(prompts, answers, strict=True) for part in both]
        return Corpus(
            np.concatenate(parts),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.asarray([len(p) for p in prompts], dtype=np.int32),
            np.asarray(temperatures, dtype=np.float32),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    @property
    def num_answer_tokens(self) -> int:
        return int(len(self.tokens) - self.prompt_lengths.sum())

    def answer_tokens(self) -> NDArray[np.int32]:
        """The tokens of all answers, in order."""
        position = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)
        return self.tokens[position >= np.repeat(self.prompt_lengths, self.lengths)]

    def select(self, keep: Sequence[int] | NDArray[np.int64]) -> "Corpus":
        pieces = [self.tokens[self.offsets[i] : self.offsets[i + 1]] for i in keep]
        index = np.asarray(keep, dtype=np.int64)
        return Corpus(
            np.concatenate(pieces) if pieces else np.empty(0, np.int32),
            np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64),
            self.prompt_lengths[index],
            self.temperatures[index],
        )

    def split(self, held_out_share: float) -> tuple["Corpus", "Corpus"]:
        """(for training, held out), decided by a hash of the prompt alone."""
        held_out = [self._prompt_hash(i) < held_out_share for i in range(len(self))]
        sides = [[i for i, held in enumerate(held_out) if held is side] for side in (False, True)]
        if not sides[0] or not sides[1]:
            raise InvalidOptionError(
                f"{len(self)} answers cannot be split with {held_out_share:.0%} held out: one side would be empty. "
                "Give more prompts, or another share."
            )
        return self.select(sides[0]), self.select(sides[1])

    def _prompt_hash(self, i: int) -> float:
        prompt = self.tokens[self.offsets[i] : self.offsets[i] + self.prompt_lengths[i]]
        return int.from_bytes(hashlib.blake2b(prompt.tobytes(), digest_size=8).digest(), "big") / 2**64

    def save(self, path: Path) -> None:
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in Corpus.__slots__}
        save_file(arrays, path)

    @staticmethod
    def load(path: Path) -> "Corpus":
        arrays = load_file(path)
        return Corpus(*(arrays[name] for name in Corpus.__slots__))


class Batches:
    """Endless batches of about `batch_tokens` padded tokens, shuffled anew every epoch; a function of (seed, step)."""

    def __init__(self, corpus: Corpus, batch_tokens: int, device: torch.device, seed: int = 0) -> None:
        self.corpus, self.seed, self.device = corpus, seed, device
        self.batch_tokens = batch_tokens
        self._flat = torch.from_numpy(corpus.tokens).to(device)
        self._epoch, self._plan = -1, [np.empty(0, np.int64)]

    @property
    def steps_per_epoch(self) -> int:
        return len(self._plan_epoch(0))

    def at(self, step: int) -> Batch:
        """Batch number `step` of the endless sequence."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._load(self._plan_epoch(epoch)[index])

    def once(self) -> Iterator[Batch]:
        for _, batch in self.once_with_rows():
            yield batch

    def once_with_rows(self) -> Iterator[tuple[NDArray[np.int64], Batch]]:
        """Every sequence once, with its place in the corpus."""
        for rows in self._plan_epoch(0):
            yield rows, self._load(rows)

    def _plan_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._make_plan(epoch)
        return self._plan

    def _make_plan(self, epoch: int) -> list[NDArray[np.int64]]:
        # Sorting by a padded length with a random tie break groups equal shapes without fixing which sequences share a
        # batch. The number of batches is the same in every epoch, because it depends on the padded lengths alone.
        rng = np.random.default_rng([self.seed, epoch])
        padded = -(-self.corpus.lengths // LENGTH_STEP) * LENGTH_STEP
        shuffled = rng.permutation(len(padded))
        order = shuffled[np.argsort(padded[shuffled], kind="stable")][::-1]
        plan: list[NDArray[np.int64]] = []
        begin = 0
        while begin < len(order):
            count = max(1, self.batch_tokens // int(padded[order[begin]]))
            plan.append(order[begin : begin + count])
            begin += count
        return [plan[i] for i in rng.permutation(len(plan))]

    def _load(self, rows: NDArray[np.int64]) -> Batch:
        lengths = torch.from_numpy(self.corpus.lengths[rows]).to(self.device)
        starts = torch.from_numpy(self.corpus.offsets[rows]).to(self.device)
        width = int(-(-self.corpus.lengths[rows].max() // LENGTH_STEP) * LENGTH_STEP)
        index = torch.arange(width, device=self.device)
        there = index < lengths[:, None]
        tokens = torch.where(there, self._flat[torch.where(there, starts[:, None] + index, 0)].long(), 0)
        prompt_lengths = torch.from_numpy(self.corpus.prompt_lengths[rows].astype(np.int64)).to(self.device)
        return Batch(tokens, lengths, prompt_lengths)


def draft_vocabulary(corpus: Corpus, size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The target ids that answers use most, ascending [size], and the share of answer tokens they cover.

    Where answers use fewer tokens, the lowest unused ids fill up: most tokenizers number common ones first."""
    counts = np.bincount(corpus.answer_tokens(), minlength=vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    return torch.from_numpy(chosen.astype(np.int64)), float(counts[chosen].sum() / max(1, counts.sum()))
