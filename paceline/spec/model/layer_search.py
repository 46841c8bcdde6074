"""Which layers should draft? A search for the subset that decodes fastest.

Agreement is measured by teacher forcing. The target's own greedy outputs are written into a KV cache once; then one
pass of a subset over all their positions says how often its next token is the target's. Each row is fed as a draft
node: it attends to the target's keys and values before it and to itself, exactly as a first draft token would.

A subset with agreement a and cost c (its pass over the target's) is worth

    max over K of   expected tokens of a chain of K at rate a  /  (1 + K c)

The search takes layers away one by one, each time the one that is missed least among a few tried, then tries swaps.
"""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.forward import Decoder, ForwardBatch
from paceline.core.kv_tensor import allocate_kv
from paceline.core.model_config import ModelConfig
from paceline.core.packing import NodePlaces, RequestRows, pack
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.lab.expected import expected_tokens

BLOCK_SIZE = 16
MAX_ROWS = 256  # of one pass
MAX_CHAIN = 12
CANDIDATES = 5  # layers tried before one is taken away


@dataclass(frozen=True, slots=True)
class Candidate:
    layers: tuple[int, ...]
    agreement: float
    speedup: float  # over plain decoding, with the best chain length
    num_speculative_tokens: int


class AgreementMeter:
    """How often a subset of layers predicts the token that the whole target chose."""

    def __init__(self, decoder: Decoder, texts: Sequence[tuple[Sequence[int], int]]) -> None:
        """`texts`: (prompt + the target's greedy output, length of the prompt)."""
        self._decoder = decoder
        self._texts = [(list(tokens), start) for tokens, start in texts if len(tokens) > max(start, 1)]
        if not self._texts:
            raise InvalidOptionError("there is no output to learn from: every text is as long as its prompt")
        self._blocks: list[list[int]] = []
        num_blocks = 0
        for tokens, _ in self._texts:
            needed = -(-len(tokens) // BLOCK_SIZE)
            self._blocks.append(list(range(num_blocks, num_blocks + needed)))
            num_blocks += needed
        self._scratch = num_blocks * BLOCK_SIZE  # slots [scratch, scratch + MAX_ROWS): the drafting rows' own KV
        num_slots = self._scratch + MAX_ROWS
        self._kv = allocate_kv(decoder.config, num_slots, decoder.dtype, decoder.device)
        for (tokens, _), blocks in zip(self._texts, self._blocks, strict=True):
            for begin in range(0, len(tokens), MAX_ROWS):
                rows = RequestRows(blocks, tokens[begin : begin + MAX_ROWS], begin)
                decoder.forward(pack([rows], BLOCK_SIZE), self._kv)

    @property
    def num_positions(self) -> int:
        return sum(len(tokens) - start for tokens, start in self._texts)

    def agreement(self, layers: Sequence[int]) -> float:
        right = 0
        for (tokens, start), blocks in zip(self._texts, self._blocks, strict=True):
            # Token i predicts token i + 1; outputs begin at `start`.
            for begin in range(start - 1, len(tokens) - 1, MAX_ROWS):
                positions = list(range(begin, min(begin + MAX_ROWS, len(tokens) - 1)))
                batch = self._batch([tokens[i] for i in positions], positions, blocks)
                logits = self._decoder.forward(batch, self._kv, layers=list(layers)).logits
                following = torch.tensor([tokens[i + 1] for i in positions], device=logits.device)
                right += int((logits.argmax(dim=1) == following).sum())
        return right / self.num_positions

    def pass_seconds(self, layers: Sequence[int], repeats: int = 7) -> float:
        """Median time of a pass of one row."""
        batch = self._batch([self._texts[0][0][0]], [0], self._blocks[0])
        times = []
        for _ in range(repeats):
            begin_s = time.perf_counter()
            self._decoder.forward(batch, self._kv, layers=list(layers)).logits.argmax().item()
            times.append(time.perf_counter() - begin_s)
        return sorted(times)[repeats // 2]

    def _batch(self, tokens: list[int], positions: list[int], blocks: list[int]) -> ForwardBatch:
        """Each token is a draft of its own, of one node, after the text before its position."""
        slots = range(self._scratch, self._scratch + len(tokens))
        nodes = DraftTree(tokens, [-1] * len(tokens))
        rows = RequestRows(blocks, [], 0, nodes, len(tokens), NodePlaces(positions, slots))
        return pack([rows], BLOCK_SIZE)


def search_layers(
    agreement: Callable[[Sequence[int]], float],
    cost: Callable[[int], float],  # of a pass of that many layers, over a pass of all
    num_layers: int,
    evaluations: int,
    seed: int = 0,
    on_step: Callable[[int, Candidate], None] = lambda done, best: None,
) -> Candidate:
    """The best subset found within `evaluations` measurements; the first and last layer always stay."""
    rng = random.Random(seed)
    known: dict[tuple[int, ...], Candidate] = {}
    best: Candidate | None = None

    def judge(layers: Sequence[int]) -> Candidate:
        nonlocal best
        key = tuple(sorted(layers))
        if key not in known:
            known[key] = judged(key, agreement(key), cost(len(key)))
        # A first answer in any case; then only proper subsets count, whether or not they pay.
        if best is None or len(best.layers) == num_layers or known[key].speedup > best.speedup:
            best = known[key]
        on_step(len(known), best)
        return known[key]

    current = judge(range(num_layers))
    while len(current.layers) > 3 and len(known) < 0.75 * evaluations:
        removable = list(current.layers[1:-1])
        tried = rng.sample(removable, min(CANDIDATES, len(removable)))
        without = [judge([layer for layer in current.layers if layer != out]) for out in tried]
        current = max(without, key=lambda candidate: candidate.agreement)
    stale = 0
    while len(known) < evaluations and best is not None and len(best.layers) > 2 and stale < evaluations:
        outside = [layer for layer in range(num_layers) if layer not in best.layers]
        if not outside:
            break
        out, into = rng.choice(best.layers[1:-1]), rng.choice(outside)
        before = len(known)
        judge([*(layer for layer in best.layers if layer != out), into])
        stale += len(known) == before  # a subset met before is no evaluation, but must not go on for ever
    assert best is not None
    return best


def judged(layers: tuple[int, ...], agreement: float, cost: float) -> Candidate:
    speeds = {k: expected_tokens(agreement, k) / (1.0 + k * cost) for k in range(1, MAX_CHAIN + 1)}
    best = max(speeds, key=lambda k: speeds[k])
    return Candidate(layers, agreement, speeds[best], best)


def stored_path(folder: Path, config: ModelConfig) -> Path:
    """One file for each model shape: a wrong guess of the model would cost speed, never correctness."""
    name = f"{config.family}-{config.num_layers}x{config.hidden_size}-v{config.vocab_size}"
    return folder / "layer_skip" / f"{name}.json"


def store(path: Path, best: Candidate, about: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"draft_layers": list(best.layers), "num_speculative_tokens": best.num_speculative_tokens} | about
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    temporary.replace(path)  # whole or not at all


def load_stored(path: Path) -> list[int] | None:
    """The tuned layers, or None where none were tuned."""
    if not path.is_file():
        return None
    try:
        return [int(layer) for layer in json.loads(path.read_text())["draft_layers"]]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidOptionError(
            f"{path} does not hold tuned layers ({error}): delete it, or run `paceline tune layer-skip` again"
        ) from error
