"""A draft model with another tokenizer: drafts cross over as text.

The request's tokens become text, the text becomes the draft model's tokens, its draft becomes text again, and that
text becomes the target's tokens. The draft model's token counts differ from the target's, so its KV has a pool of
blocks of its own. What was computed is reused as far as the draft model's tokens agree with those it saw before.

This needs tokenizers that lose nothing: text that comes back changed, or pieces that do not add up to the whole, would
draft nonsense for ever, so such a pair is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.core.tokenizer import Tokenizer
from paceline.core.tree import EMPTY_TREE, DraftTree
from paceline.errors import InvalidOptionError
from paceline.models.padded_decoder import PaddedDecoder
from paceline.spec.engine_parts import EngineParts
from paceline.spec.model.model_drafter import ModelDrafter
from paceline.spec.proposer import Budget, RequestPass
from paceline.spec.round_draft import RoundRoom

PROBES = ("def f(x):\n    return x + 1", " a  b", "naïve café", "1,234.5", "a")
MAX_TAIL = 96  # target tokens whose text is tokenized again at every step
KEPT_TAIL = 32
EXTRA_DRAFT = 2  # the draft model's tokens may be shorter than the target's
INCOMPLETE = "\ufffd"  # stands for the bytes of a character that is not finished yet


@dataclass(slots=True)
class Mirror:
    """A request as the draft model sees it."""

    twin: Request  # the same text in the draft model's tokens
    anchor: int = 0  # target tokens [0, anchor) are `prefix`, for good
    prefix: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)  # the draft model's tokens that have KV


class ForeignDrafter:
    def __init__(self, services: EngineParts, loaded: Any, sampling: str | None, widths: Sequence[int] | None) -> None:
        assert services.tokenizer is not None
        self._target: Tokenizer = services.tokenizer
        self._draft: Tokenizer = loaded.tokenizer
        if sampling not in (None, "greedy") or widths is not None:
            raise InvalidOptionError(
                "a draft model with another tokenizer drafts greedy chains as text: it has no probabilities of the "
                f"target's tokens and shares none of its noise; got draft_sampling {sampling!r}, tree_widths {widths!r}"
            )
        check_lossless(self._target, "the target's")
        check_lossless(self._draft, "the draft model's")
        from paceline.spec.model.draft_model import allocate

        self._block_size = services.block_size
        self._free_blocks = list(range(services.num_slots // services.block_size))
        self._vocab_size = services.vocab_size
        self._max_len: int = min(loaded.decoder.config.max_position, services.num_slots)
        kv_cache = allocate(loaded.decoder, services)
        self._drafter = ModelDrafter(loaded.decoder, kv_cache, services.block_size, sampling="greedy")
        self._mirrors: dict[str, Mirror] = {}

    def draft(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        ready: dict[int, Mirror] = {}
        for i, request in enumerate(requests):
            mirror = self._mirrors.setdefault(request.request_id, Mirror(_empty_twin()))
            if self._sync(mirror, request) and self._reserve(mirror, budgets[i].max_depth + EXTRA_DRAFT):
                ready[i] = mirror
        own = [Budget(budgets[i].max_depth + EXTRA_DRAFT, budgets[i].max_depth + EXTRA_DRAFT) for i in ready]
        starts = [self._valid(mirror) for mirror in ready.values()]
        chains = self._drafter.draft([mirror.twin for mirror in ready.values()], own, starts)
        trees = [EMPTY_TREE] * len(requests)
        for (i, mirror), chain in zip(ready.items(), chains, strict=True):
            mirror.fed = [*mirror.twin.token_ids, *chain.token_ids[:-1]]
            trees[i] = self._cross(mirror, requests[i], chain.token_ids, budgets[i])
        return trees

    def forget(self, request: Request) -> None:
        mirror = self._mirrors.pop(request.request_id, None)
        if mirror is not None:
            self._free_blocks += mirror.twin.block_ids

    def round_draft(self, target: PaddedDecoder, room: RoundRoom) -> None:
        """Text is made on the host."""

    def follow(self, passes: Sequence[RequestPass]) -> None:
        pass

    def _sync(self, mirror: Mirror, request: Request) -> bool:
        """Bring the mirror up to the request's text; False in the middle of a character."""
        tokens = request.token_ids
        if len(tokens) - mirror.anchor > MAX_TAIL:
            self._move_anchor(mirror, tokens)
        tail = self._target.decode(tokens[mirror.anchor :], skip_special_tokens=False)
        if tail.endswith(INCOMPLETE):
            return False
        ids = [*mirror.prefix, *self._draft.encode(tail, add_special_tokens=False)]
        mirror.twin.token_ids = ids
        return 0 < len(ids) < self._max_len

    def _move_anchor(self, mirror: Mirror, tokens: Sequence[int]) -> None:
        """Settle all but the newest tokens, up to a place where a word begins."""
        for anchor in range(len(tokens) - KEPT_TAIL, mirror.anchor, -1):
            begins = self._target.decode(tokens[anchor : anchor + 1], skip_special_tokens=False)
            if begins[:1].isspace():
                settled = self._target.decode(tokens[mirror.anchor : anchor], skip_special_tokens=False)
                mirror.prefix += self._draft.encode(settled, add_special_tokens=False)
                mirror.anchor = anchor
                return

    def _valid(self, mirror: Mirror) -> int:
        """Tokens of the twin that have KV, its last one never among them."""
        now, fed = mirror.twin.token_ids, mirror.fed
        same = min(len(mirror.prefix), len(fed), len(now))
        if now[:same] != fed[:same]:
            return 0
        while same < min(len(now), len(fed)) and now[same] == fed[same]:
            same += 1
        return min(same, len(now) - 1)

    def _reserve(self, mirror: Mirror, depth: int) -> bool:
        twin = mirror.twin
        needed = -(-(twin.num_tokens + depth) // self._block_size) - len(twin.block_ids)
        if needed > len(self._free_blocks):
            return False  # no room: this request decodes plainly
        for _ in range(needed):
            twin.block_ids.append(self._free_blocks.pop())
        return True

    def _cross(self, mirror: Mirror, request: Request, chain: Sequence[int], budget: Budget) -> DraftTree:
        text = self._draft.decode(list(chain), skip_special_tokens=False).rstrip(INCOMPLETE)
        tail = request.token_ids[mirror.anchor :]
        whole = self._target.decode(tail, skip_special_tokens=False) + text
        ids = self._target.encode(whole, add_special_tokens=False)
        # Tokenized with what stands before it, the draft has the tokens that the target would use there.
        tokens = ids[len(tail) :] if ids[: len(tail)] == tail else self._target.encode(text, add_special_tokens=False)
        known = [token for token in tokens if token < self._vocab_size]
        return DraftTree.chain(known).cut(budget.num_nodes, budget.max_depth)


def _empty_twin() -> Request:
    return Request("draft", [], SamplingParams(temperature=0.0), max_tokens=1, seed=0)


def same_tokens(services: EngineParts, loaded: Any) -> bool:
    """Do token ids mean the same to both models? Padding rows past the tokenizer's own ids do not matter."""
    if services.tokenizer is None:
        return False
    ours = services.tokenizer.vocabulary()
    if ours != loaded.tokenizer.vocabulary():
        return False
    if loaded.decoder.config.vocab_size < max(ours.values(), default=0) + 1:
        raise InvalidOptionError(
            f"the draft model has {loaded.decoder.config.vocab_size} rows for a tokenizer of {len(ours)} tokens: "
            "it does not belong to this tokenizer"
        )
    return True


def check_lossless(tokenizer: Tokenizer, whose: str) -> None:
    """Refuse a tokenizer that changes text, or whose pieces do not add up."""
    for probe in PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False)
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        pieces = "".join(tokenizer.decode(ids[i : i + 1], skip_special_tokens=False) for i in range(len(ids)))
        back = whole if whole != probe or INCOMPLETE in pieces else pieces
        if back != probe:
            raise InvalidOptionError(
                f"the two models have different tokenizers, so drafts must cross over as text, but {whose} tokenizer "
                f"makes {back!r} of {probe!r}: choose a draft model with the target's own tokenizer"
            )
