"""`merge`: several drafters, one trie, verified in one pass.

    {"method": "merge", "members": ["ngram", "suffix", "recycling"], "node_budget": 32}

Every member drafts as if the whole budget were its own. Nodes with the same path are joined, and the budget goes to the
nodes that are likeliest to be accepted, by each member's past drafts (credit.py), the likeliest path first. Each node
keeps the names of the members that drafted it. A member whose drafts are not worth its time is skipped (usefulness.py).

Members whose tokens are *sampled* from a distribution of their own (SpecInfer's several draft models under rule R3)
keep their trees whole, side by side, each node with its own q: choosing nodes by what was drawn would bias the output.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.block_rows import BlockRows
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tree import EMPTY_TREE, DraftTree, likeliest
from paceline.errors import InvalidOptionError
from paceline.spec.drafter_faults import DrafterFaults
from paceline.spec.engine_parts import EngineParts
from paceline.spec.merge.credit import Credit, Guess, Row, make_guess
from paceline.spec.merge.usefulness import Usefulness
from paceline.spec.proposer import Budget, Proposer, StepContext, union

if TYPE_CHECKING:
    from paceline.spec.config.speculative_config import SpeculativeConfig

MIN_CHANCE = 0.004  # of a path: a node costs a row even where the budget has room for it


@dataclass(slots=True)
class Candidates:
    """The joined trie of everything that was drafted, before the budget cuts it."""

    token_ids: list[int] = field(default_factory=list)
    guesses: list[list[Guess]] = field(default_factory=list)  # by node
    children: dict[int, dict[int, int]] = field(default_factory=lambda: {-1: {}})  # node -> token -> child

    def add(self, member: str, tree: DraftTree) -> None:
        node_of, depths = [-1], [0]  # of the tree's nodes, the root in front
        num_children: dict[int, int] = {}
        for i, (token, parent) in enumerate(zip(tree.token_ids, tree.parents, strict=True)):
            above, depth = node_of[parent + 1], depths[parent + 1] + 1
            node = self.children[above].get(token)
            if node is None:
                node = self.children[above][token] = len(self.token_ids)
                self.token_ids.append(token)
                self.guesses.append([])
                self.children[node] = {}
            rank = num_children.get(parent, 0)
            num_children[parent] = rank + 1
            confidence = None if tree.confidence is None else tree.confidence[i]
            self.guesses[node].append(make_guess(member, depth, rank, confidence))
            node_of.append(node)
            depths.append(depth)

    def contested(self, parent: int) -> bool:
        """Do the first choices of the members differ here?"""
        children = self.children[parent]
        if len(children) < 2:
            return False
        return sum(any(guess[1] == 0 for guess in self.guesses[child]) for child in children.values()) > 1

    def teach(self, credit: Credit, new_token_ids: Sequence[int]) -> list[list[str]]:
        """Judge every guess on the path that the tokens took.

        For each token that was drafted: the members that drafted it."""
        at = -1
        hits: list[list[str]] = []
        for token in new_token_ids:
            contested = self.contested(at)
            for child in self.children[at].values():
                credit.record(self.guesses[child], contested, self.token_ids[child] == token)
            following = self.children[at].get(token)
            if following is None:
                break
            hits.append([guess[0] for guess in self.guesses[following]])
            at = following
        return hits


class Alone:
    """The same where one member drafted alone: most of the time, and then there is no trie to build."""

    def __init__(self, member: str, tree: DraftTree) -> None:
        self.member, self.tree = member, tree
        self.guesses: list[Guess] = []
        depths: list[int] = []
        num_children: dict[int, int] = {}
        confidence = tree.confidence
        for node, parent in enumerate(tree.parents):
            depths.append(1 if parent < 0 else depths[parent] + 1)
            rank = num_children.get(parent, 0)
            num_children[parent] = rank + 1
            guess = make_guess(member, depths[node], rank, None if confidence is None else confidence[node])
            self.guesses.append(guess)

    def teach(self, credit: Credit, new_token_ids: Sequence[int]) -> list[list[str]]:
        at = -1
        hits: list[list[str]] = []
        token_ids, parents = self.tree.token_ids, self.tree.parents
        for token in new_token_ids:
            following = -1
            for node in range(at + 1, len(parents)):
                if parents[node] == at:
                    credit.record((self.guesses[node],), False, token_ids[node] == token)
                    if token_ids[node] == token:
                        following = node
            if following < 0:
                break
            hits.append([self.member])
            at = following
        return hits


class MergeProposer(Proposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        members: "Sequence[SpeculativeConfig]",
        credit: Sequence[Row] = (),  # what is known of the members before anything runs
    ) -> None:
        from paceline.spec.methods import build_proposer  # the table has a row for this file

        self.configs = tuple(members)
        self.members: dict[str, Proposer] = {}
        self._limits: dict[str, Budget] = {}
        for config in members:
            same = sum(name.split("#")[0] == config.method for name in self.members)
            name = config.method if not same else f"{config.method}#{same + 1}"
            self.members[name] = build_proposer(config.method, services, config.options)
            self._limits[name] = Budget(config.node_budget, config.num_speculative_tokens)
        self.needs = union([member.needs for member in self.members.values()])
        unknown = sorted({row[0] for row in credit} - set(self.members))
        if unknown:
            raise InvalidOptionError(f"credit names {unknown[0]!r}, but the members are {', '.join(self.members)}")
        self.credit = Credit(credit)
        always_told = [name for name, member in self.members.items() if member.needs.hidden_layers]
        self.usefulness = Usefulness(list(self.members), always_told)
        self.faults = DrafterFaults()
        self.learns = True  # from the outcome of the next drafts; learning from only some of them saves time
        self._candidates: dict[str, Candidates | Alone] = {}  # request id -> drafts to learn from

    def check_params(self, params: SamplingParams) -> None:
        for member in self.members.values():
            member.check_params(params)

    def use_clock(self, clock: Callable[[], float]) -> None:
        self.usefulness.clock = clock
        for member in self.members.values():
            member.use_clock(clock)

    def member_figures(self) -> dict[str, dict[str, Any]]:
        figures: dict[str, dict[str, Any]] = {
            name: {"draft_s": seconds} for name, seconds in self.usefulness.seconds().items()
        }
        self.faults.add_to(figures)
        return figures

    def block_rows(self) -> list[BlockRows]:
        return [
            rows for name, member in self.members.items() if name not in self.faults.off for rows in member.block_rows()
        ]

    def observe(self, step: StepContext) -> None:
        self.faults.end_step()
        if self._candidates:
            for verified in step.passes:
                candidates = self._candidates.pop(verified.request.request_id, None)
                if candidates is not None:
                    self._learn(candidates, verified.new_token_ids)
            for request in step.gone:
                self._candidates.pop(request.request_id, None)
        usefulness, clock = self.usefulness, self.usefulness.clock
        for name, member in self.members.items():
            told = usefulness.is_told(name)
            if (not told and not step.gone) or name in self.faults.off:
                continue
            begin_s = clock()
            try:
                member.observe(step if told else StepContext([], gone=step.gone))
            except BaseException as error:
                self.faults.note(name, error)
            usefulness.spend(name, clock() - begin_s)

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        usefulness = self.usefulness
        drafts = {
            name: self._ask(name, step, usefulness.budgets(name, self._limited(name, budgets)))
            for name in usefulness.worth_asking()
        }
        merged = []
        for i, (request, budget) in enumerate(zip(step.requests, budgets, strict=True)):
            trees = {name: drafted[i] for name, drafted in drafts.items() if drafted[i].token_ids}
            merged.append(self._join(request, trees, budget) if trees else EMPTY_TREE)
        return merged

    def propose_alone(self, name: str, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        """One member's trees, as it drafts them. Nothing is learned from their outcome."""
        self.usefulness.ask_one(name)
        trees = self._ask(name, step, self._limited(name, budgets))
        return [tree.by(name) if tree.token_ids else tree for tree in trees]

    def _limited(self, name: str, budgets: Sequence[Budget]) -> list[Budget]:
        """What the member may draft, by its own configuration too."""
        limit = self._limits[name]
        return [
            Budget(min(nodes, limit.num_nodes), min(depth, limit.max_depth), *min_probs)
            for nodes, depth, *min_probs in budgets
        ]

    def _ask(self, name: str, step: StepContext, budgets: list[Budget]) -> list[DraftTree]:
        """One member's trees, its time counted; a member that raises has none."""
        nothing = [EMPTY_TREE] * len(budgets)
        if name in self.faults.off:
            return nothing
        clock = self.usefulness.clock
        begin_s = clock()
        try:
            trees = self.members[name].propose(step, budgets)
            if len(trees) != len(budgets):
                raise ValueError(f"{name} drafted {len(trees)} trees for {len(budgets)} requests")
        except BaseException as error:
            self.faults.note(name, error)
            trees = nothing
        self.usefulness.spend(name, clock() - begin_s)
        return trees

    def _join(self, request: Request, trees: dict[str, DraftTree], budget: Budget) -> DraftTree:
        if any(tree.draft_probs is not None for tree in trees.values()):
            return side_by_side(trees, budget)
        if len(trees) == 1:
            [(name, tree)] = trees.items()
            if len(tree.token_ids) <= budget.num_nodes:
                return self._rate(request, name, tree)
        candidates = Candidates()
        for name, tree in trees.items():
            candidates.add(name, tree)
        if self.learns:
            self._candidates[request.request_id] = candidates
        return self._select(candidates, budget.num_nodes)

    def _rate(self, request: Request, name: str, tree: DraftTree) -> DraftTree:
        """One member's tree as it is, the unlikely nodes left out: `_select` without anything to choose between."""
        alone = Alone(name, tree)
        if self.learns:
            self._candidates[request.request_id] = alone
        chances = [self.credit.chance((guess,), contested=False) for guess in alone.guesses]
        paths: list[float] = []
        for parent, chance in zip(tree.parents, chances, strict=True):
            paths.append(chance if parent < 0 else chance * paths[parent])
        rated = DraftTree(tree.token_ids, tree.parents, members=[(name,)] * len(paths), confidence=chances)
        if self.members[name].keeps_whole:
            return rated
        return rated.keep(likeliest(paths, len(paths), MIN_CHANCE))

    def _select(self, candidates: Candidates, num_nodes: int) -> DraftTree:
        """The likeliest nodes: a node's chance is its path's, so a parent always comes before its children."""
        token_ids: list[int] = []
        parents: list[int] = []
        members: list[tuple[str, ...]] = []
        confidence: list[float] = []
        heap: list[tuple[float, int, int, float]] = []  # (-chance of the path, candidate, parent in tree, own chance)

        def push(candidate: int, node: int, path: float) -> None:
            if not candidates.children[candidate]:
                return
            contested = candidates.contested(candidate)
            for child in candidates.children[candidate].values():
                chance = self.credit.chance(candidates.guesses[child], contested)
                if path * chance >= MIN_CHANCE:
                    heapq.heappush(heap, (-path * chance, child, node, chance))

        push(-1, -1, 1.0)
        while heap and len(token_ids) < num_nodes:
            negative, candidate, parent, chance = heapq.heappop(heap)
            token_ids.append(candidates.token_ids[candidate])
            parents.append(parent)
            members.append(tuple([guess[0] for guess in candidates.guesses[candidate]]))
            confidence.append(chance)
            push(candidate, len(token_ids) - 1, -negative)
        return DraftTree(token_ids, parents, members=members, confidence=confidence)

    def _learn(self, candidates: "Candidates | Alone", new_token_ids: Sequence[int]) -> None:
        self.usefulness.record(candidates.teach(self.credit, new_token_ids), len(new_token_ids))


def side_by_side(trees: dict[str, DraftTree], budget: Budget) -> DraftTree:
    """The trees under one root, nothing joined. A fixed draft's q is the point mass on its token."""
    probs = [tree.draft_probs for tree in trees.values() if tree.draft_probs is not None]
    token_ids: list[int] = []
    parents: list[int] = []
    members: list[tuple[str, ...]] = []
    rows = []
    for name, whole in trees.items():
        # Room was shared beforehand, by counting trees and not tokens.
        tree = whole.cut(budget.num_nodes // len(trees))
        base = len(token_ids)
        token_ids += tree.token_ids
        parents += [-1 if parent < 0 else parent + base for parent in tree.parents]
        members += [(name,)] * len(tree)
        if tree.draft_probs is None:
            fixed = torch.tensor(tree.token_ids, device=probs[0].device)
            rows.append(torch.nn.functional.one_hot(fixed, probs[0].shape[1]).to(probs[0].dtype))
        else:
            rows.append(tree.draft_probs)
    return DraftTree(token_ids, parents, torch.cat(rows), members)
