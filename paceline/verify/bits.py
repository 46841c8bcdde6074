"""The decoder's own bits: a row alone, in chunks, among other rows at several places, and as a node of a tree.

Answers show a kernel that rounds by the number of rows only where two tokens happen to be close. The logits show it at
once, so this check is cheap and does not depend on chance.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.tree import DraftTree
from paceline.verify.check import Check
from paceline.verify.passes import Part, Passes
from paceline.verify.rounding import is_rounding
from paceline.verify.workload import Workload

MAX_LENGTH = 96  # tokens of the sequence: more than an attention kernel's block of keys
CHUNKS = (7, 33, MAX_LENGTH)
# Around the sizes at which libraries change their kernel: vectors, tiles of 4 to 128 rows, and one row more.
ROWS = (2, 3, 4, 8, 16, 17, 33, 64, 65, 129)
TREE_DEPTH = 4


@dataclass(slots=True)
class Tally:
    num_rows: int = 0
    num_differing: int = 0
    largest_difference: float = 0.0

    def add(self, found: Tensor, expected: Tensor) -> None:  # [rows, vocab] each
        same = (found == expected).all(-1)
        self.num_rows += len(same)
        self.num_differing += int((~same).sum())
        worst = (found - expected).abs().max()
        self.largest_difference = float(torch.maximum(worst, torch.tensor(self.largest_difference)))  # keeps a NaN


class SameRows:
    """One sequence, computed token by token, and the same tokens among other rows."""

    def __init__(self, workload: Workload) -> None:
        sequences = sorted(workload.sequences(), key=len)
        self._text = sequences[-1][: min(MAX_LENGTH, workload.model.decoder.config.max_position)]
        self._others = [token for sequence in sequences for token in sequence]
        self._decoder = workload.model.decoder
        self._passes = Passes(self._decoder, 3, max(ROWS) + MAX_LENGTH)  # ours, and neighbours before and after it
        rows = [self._passes.logits(Part(0, i, [token])) for i, token in enumerate(self._text)]
        self._alone = torch.cat(rows)  # [tokens, vocab]

    def in_chunks(self) -> Tally:
        tally = Tally()
        for size in CHUNKS:
            passes = Passes(self._decoder, 1, MAX_LENGTH)
            starts = range(0, len(self._text), size)
            found = [passes.logits(Part(0, start, self._text[start : start + size])) for start in starts]
            tally.add(torch.cat(found), self._alone)
        return tally

    def among_others(self) -> Tally:
        tally = Tally()
        at = len(self._text) - 1
        for num_rows in ROWS:
            for num_before in {0, num_rows // 2, num_rows - 1}:
                found = self._beside(Part(0, at, self._text[at:]), num_before, num_rows - 1 - num_before)
                tally.add(found[num_before : num_before + 1], self._alone[at:])
        return tally

    def in_a_tree(self) -> Tally:
        """Drafts of the true text, each with a wrong sibling before it. Its nodes overwrite what comes after them."""
        tally = Tally()
        for committed in (len(self._text) - TREE_DEPTH, len(self._text) // 2):
            tokens, parents = [], []
            for depth, token in enumerate(self._text[committed : committed + TREE_DEPTH]):
                parent = 2 * depth - 1  # the true node above; -1 at the top
                tokens += [(token + 1) % self._decoder.config.vocab_size, token]
                parents += [parent, parent]
            part = Part(0, committed - 1, self._text[committed - 1 : committed], DraftTree(tokens, parents))
            for num_before in (0, 5):
                true_rows = [num_before + row for row in (0, *range(2, len(tokens) + 1, 2))]
                found = self._beside(part, num_before, num_before)[true_rows]
                tally.add(found, self._alone[committed - 1 : committed - 1 + len(found)])
        return tally

    def _beside(self, part: Part, num_before: int, num_after: int) -> Tensor:
        before, after = Part(1, 0, self._company(num_before)), Part(2, 0, self._company(num_after))
        return self._passes.logits(*(p for p in (before, part, after) if p.new))

    def _company(self, count: int) -> Sequence[int]:
        return [self._others[i % len(self._others)] for i in range(count)]


def check_bits(workload: Workload) -> Iterator[Check]:
    begin_s = time.perf_counter()
    same = SameRows(workload)
    for name, compare in (
        ("a row in chunks", same.in_chunks),
        (f"a row among up to {max(ROWS)}, at several places", same.among_others),
        ("a row as a node of a tree", same.in_a_tree),
    ):
        tally = compare()
        yield _check(workload, name, tally, time.perf_counter() - begin_s)
        begin_s = time.perf_counter()


def _check(workload: Workload, name: str, tally: Tally, seconds: float) -> Check:
    decoder = workload.model.decoder
    passed = tally.num_differing == 0
    finding = f"{tally.num_differing} of {tally.num_rows} rows differ from the same row alone"
    if not passed:
        finding += f", by up to {tally.largest_difference:.1e}"
        finding += "; a broken promise" if decoder.batch_invariant else "; not promised here"
    figures = {
        "num_rows": tally.num_rows,
        "num_differing": tally.num_differing,
        "largest_difference": tally.largest_difference,
        "promised": decoder.batch_invariant,
    }
    rounding = not passed and is_rounding(decoder, tally.largest_difference)
    return Check("bits", name, passed, finding, figures, seconds, explained_by_rounding=rounding)
