"""R5, block verification: a chain is judged as a whole, and never does worse than R2.

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i))         how much of the block up to i the target wants
    S_i = sum (w_i p(.) - q(.))+  at the next position        mass still to be handed out there
    h_i = S_i / (S_i + 1 - w_i) for i < K,  h_K = w_K

Every i gets its own coin with probability h_i, and the *last* i that comes up is where the block is cut: a failed coin
before it does not matter. The next token is drawn from norm((w_i p - q)+), or from p after the whole block.
"""

from collections.abc import Sequence

from paceline.core.tree import DraftTree
from paceline.ops.random import Purpose
from paceline.ops.sampling_types import Probs
from paceline.verifiers.dice import Dice
from paceline.verifiers.multi_step import require_chain
from paceline.verifiers.residual import draft_distribution
from paceline.verifiers.walk import ROOT, Path, Walk


def block_walk(tree: DraftTree, dice: Dice) -> Walk[Probs]:
    require_chain(tree, "block", "multi_step")
    p = list((yield (ROOT,)))  # p[i]: the distribution after i draft tokens
    q = [draft_distribution(tree, node, len(p[0])) for node in range(len(tree))]  # q[i]: of token i + 1
    wanted = [1.0]  # w_0, w_1, ...
    for node, token in enumerate(tree.token_ids):
        weight = min(1.0, wanted[-1] * float(p[node][token]) / float(q[node][token]))
        if weight <= 0.0:  # the target never goes this way, so there is nothing to look at further down
            break
        wanted.append(weight)
        p += yield (node,)
    cut = 0
    for i in range(1, len(wanted)):
        if dice.accept(stay_probability(i, wanted, p, q), Purpose.ACCEPT, i):
            cut = i
    accepted = list(range(cut))
    if cut == len(tree):
        return Path(accepted, dice.choose(p[cut], Purpose.BONUS))
    left = (wanted[cut] * p[cut] - q[cut]).clip(min=0.0)
    # Nothing left means that this cut has probability 0 but for rounding; p itself is then right.
    return Path(accepted, dice.choose(left if float(left.sum()) > 0.0 else p[cut], Purpose.RECOVER))


def stay_probability(i: int, wanted: Sequence[float], p: Sequence[Probs], q: Sequence[Probs]) -> float:
    """h_i for i in 1..K."""
    if i == len(q):
        return wanted[i]
    left = float((wanted[i] * p[i] - q[i]).clip(min=0.0).sum())
    denominator = left + (1.0 - wanted[i])
    return left / denominator if denominator > 0.0 else 1.0  # w_i = 1 and p = q next: cannot fail
