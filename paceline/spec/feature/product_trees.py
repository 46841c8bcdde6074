"""The trees of guesses that do not depend on each other, written as a device has them: the plain twin of
ops/triton/product_tree.py."""

import torch
from torch import Tensor

from paceline.spec.feature.draft_growth import product_tree
from paceline.spec.proposer import Budget


def product_trees(
    ids: Tensor,  # [levels, R, W] int32, the likeliest first
    log_probs: Tensor,  # [levels, R, W] float32
    flags: Tensor,  # [R] int32: 0: no tree
    trees: Tensor,  # [R, 1 + 3 * K] int32, written: see spec/tree_answers.py
    num_nodes: int,
    max_depth: int,
    lowest: float,  # log-probability from which a path is kept
) -> None:
    most = (trees.shape[1] - 1) // 3
    for i, flag in enumerate(flags.tolist()):
        tree = product_tree(
            ids[:max_depth, i].numpy(), log_probs[:max_depth, i].numpy(), Budget(num_nodes, max_depth), lowest
        )
        trees[i, 0] = count = len(tree) if flag else 0
        confidence = torch.tensor(tree.confidence or [], dtype=torch.float64).log().float()
        for field, values in enumerate((torch.tensor(tree.token_ids), torch.tensor(tree.parents))):
            trees[i, 1 + field * most : 1 + field * most + count] = values[:count].int()
        trees[i, 1 + 2 * most : 1 + 2 * most + count] = confidence.view(torch.int32)[:count]
