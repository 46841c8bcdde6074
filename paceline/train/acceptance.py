"""How many tokens per target pass a drafter would bring, found without running the engine.

On a greedy answer the drafts after token t are right or wrong: with the true tokens fed in (teacher forcing)
draft k counts only if drafts 1..k-1 were right, which is exactly when the engine would have fed the same tokens. So
walking through an answer in steps of (accepted drafts + 1) gives a chain's greedy acceptance length, not an estimate.

An answer at temperature 1 was drawn with noise, and coupled drafting uses the same: the target took the largest
log p + g, the drafter proposes its own largest log q + g. The noise itself is forgotten, but given that it led the
target to x, the chance that it leads the drafter there too is

    1 / sum_v max(p_v, q_v p_x / q_x)

(0 where x is outside of the draft vocabulary). One draw with that chance per draft, then the same walk.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.train.corpus import Batch
from paceline.train.losses import chunk_rows, top_tokens
from paceline.train.recipe import Recipe
from paceline.train.target import DenseTarget, TargetPass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Chains of `len(per_position)` drafts on held-out answers."""

    mean_acceptance_length: float  # tokens per target pass, the bonus counted
    per_position: list[float]  # share of passes in which draft 1, 2, ... was accepted
    num_passes: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "per_position": [round(share, 4) for share in self.per_position],
            "num_passes": self.num_passes,
        }


@torch.no_grad()
def measure_acceptance(
    recipe: Recipe, target: DenseTarget, batches: Iterable[Batch], num_tokens: int, *, coupled: bool = False
) -> Acceptance:
    """`coupled`: the answers were drawn at temperature 1; otherwise they are greedy ones."""
    passes, tokens = 0, 0
    accepted_at = torch.zeros(num_tokens, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    for batch in batches:
        seen = target.forward(batch.tokens, recipe.hidden_layers)
        if coupled:
            chances = coupled_chances(recipe, target, batch, seen, num_tokens)
            right = torch.rand(chances.shape, generator=generator).to(chances.device) < chances
            counts = right.long().cumprod(-1).sum(-1).tolist()
        else:
            counts = count_accepted(batch, greedy_drafts(recipe, batch, seen, num_tokens)).tolist()
        bounds = zip(counts, batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)
        for row, prompt_length, length in bounds:
            position = prompt_length  # the prompt's own pass brings the first token
            while position < length - 1:
                # Past the end nothing is emitted, whatever was drafted.
                accepted = min(row[position], length - 2 - position)
                passes += 1
                tokens += accepted + 1
                accepted_at[:accepted] += 1
                position += accepted + 1
    return Acceptance(
        tokens / passes if passes else 0.0, [int(n) / passes if passes else 0.0 for n in accepted_at], passes
    )


def greedy_drafts(recipe: Recipe, batch: Batch, target: TargetPass, num_tokens: int) -> Tensor:
    """[sequences, positions, num_tokens] target ids: at [s, t, k] the likeliest token for position t + 1 + k, made when
    token t was the last one, provided that the drafts before it were right. -1: no draft."""
    drafts = torch.full((*batch.tokens.shape, num_tokens), -1, dtype=torch.long, device=batch.tokens.device)
    positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    for k, states in enumerate(recipe.draft_states(batch, target, num_tokens)):
        top = top_tokens(states.flatten(0, 1), recipe.head)
        inside = positions + 1 + k < batch.tokens.shape[1]
        drafts[:, :, k] = torch.where(inside, recipe.vocabulary.ids[top].view(batch.tokens.shape), -1)
    return drafts


def count_accepted(batch: Batch, drafts: Tensor) -> Tensor:
    """[sequences, positions]: how many drafts after each token are right, up to the first wrong one."""
    num_tokens = drafts.shape[-1]
    right = torch.stack([drafts[..., k] == batch.shifted(1 + k) for k in range(num_tokens)], dim=-1)
    return right.long().cumprod(-1).sum(-1)


def coupled_chances(recipe: Recipe, target: DenseTarget, batch: Batch, seen: TargetPass, num_tokens: int) -> Tensor:
    """[sequences, positions, num_tokens]: the chance of each draft to be the token that the target drew."""
    chances = torch.zeros(*batch.tokens.shape, num_tokens, device=batch.tokens.device)
    for k, states in enumerate(recipe.draft_states(batch, seen, num_tokens)):
        drawn = batch.shifted(1 + k)
        wanted = batch.is_answer() & batch.is_answer(1 + k) & recipe.vocabulary.known[drawn]
        sequence, position = wanted.nonzero(as_tuple=True)
        chances[sequence, position, k] = coupled_chance(
            states[sequence, position],
            recipe.head,
            seen.normed[sequence, position + k],
            target.head,
            recipe.vocabulary.ids,
            drawn[sequence, position],
        )
    return chances


def coupled_chance(
    student: Tensor,  # [rows, hidden]
    student_head: Tensor,  # [draft vocab, hidden]
    teacher: Tensor,  # [rows, hidden]
    teacher_head: Tensor,  # [vocab, hidden]
    ids: Tensor,  # [draft vocab], ascending
    drawn: Tensor,  # [rows]: what the target drew, inside of the draft vocabulary
) -> Tensor:
    """[rows]: the chance that noise which led the target to `drawn` leads the drafter there too"""
    chances = torch.empty(len(student), device=student.device)
    size = chunk_rows(len(teacher_head))
    for begin in range(0, len(student), size):
        rows = slice(begin, begin + size)
        p = (teacher[rows] @ teacher_head.T).float().softmax(-1)
        q = (student[rows].to(teacher.dtype) @ student_head.to(teacher.dtype).T).float().softmax(-1)
        x = drawn[rows, None]
        ratio = p.gather(1, x) / q.gather(1, torch.searchsorted(ids, x)).clamp(min=1e-30)
        inside = p[:, ids]
        chances[rows] = 1 / (1 - inside.sum(-1) + torch.maximum(inside, ratio * q).sum(-1))
    return chances
