"""`draft_model`: a smaller model drafts, token by token or level by level.

Its keys and values lie in a tensor of its own with as many slots as the target's, addressed by the same block tables.
How far a request's KV is valid is found by comparing what was fed with what the request holds now, so an accepted draft
costs nothing, a rejected one is overwritten, and whatever was missed meanwhile (a prompt found in the prefix cache,
steps without speculation) is caught up on before the next draft.

The model may be a drafter file that `paceline train draft` wrote: a few of the target's layers, distilled, under the
target's own embedding. Without a model the one that is shipped for the target is taken, if there is one.

With `num_draft_layers` instead of a model, the target's own first layers draft, with its norm and head. Their KV is the
target's, so such a draft costs no memory at all. A model with other tokens drafts through text (foreign_drafter.py).

On the native CPU kernels a large model drafts in 4 bits, whatever its file has (`draft_quantization`): a draft pass
waits for memory, and what rounding changes is verified like everything else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.core.forward import Decoder
from paceline.core.kv_tensor import allocate_kv, touch
from paceline.core.request import Request
from paceline.core.tree import DraftTree
from paceline.errors import InvalidOptionError
from paceline.models.drafters.load import UNTRAINED, load_network
from paceline.models.loader import LoadedModel
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.static_inputs import PassRoom
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.feature_drafter import placement, target_of
from paceline.spec.model.chain_rounds import ChainRoundDraft, own_layers_draft
from paceline.spec.model.model_drafter import ModelDrafter
from paceline.spec.proposer import Budget, Needs, RequestPass, StepContext
from paceline.spec.round_draft import RoundRoom
from paceline.spec.sized_rounds import RoundsProposer, SizedRounds, round_room


@dataclass(slots=True)
class Fed:
    """What the drafting model has KV for: tokens [0, num_tokens), then `chain` in the slots behind them."""

    num_tokens: int = 0
    chain: list[int] = field(default_factory=list)

    def valid(self, token_ids: Sequence[int]) -> int:
        """How many tokens of the request, as it is now, have their KV."""
        end = self.num_tokens
        for token in self.chain:
            if end >= len(token_ids) or token_ids[end] != token:
                break
            end += 1
        return min(end, len(token_ids) - 1)  # the last token is always computed: its logits start the draft


@dataclass(frozen=True, slots=True)
class Drafting:
    """How the model drafts: options of the method."""

    sampling: str | None
    widths: Sequence[int] | None
    quantization: str = "auto"
    min_prob: float = 0.0


class Drafter(Protocol):
    """Turns requests into trees, keeping whatever KV it needs."""

    def draft(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]: ...

    def forget(self, request: Request) -> None: ...

    def round_draft(self, target: PaddedDecoder, room: RoundRoom) -> ChainRoundDraft | None:
        """Its part of rounds on the device; None where it drafts on the host only."""
        ...

    def follow(self, passes: Sequence[RequestPass]) -> None:
        """Rounds go on, and the trees of these passes were its own."""
        ...


class DraftModelProposer(RoundsProposer):
    def __init__(
        self,
        services: EngineParts,
        largest: Budget,
        *,
        model: Any,
        num_draft_layers: int | None,
        draft_sampling: str | None,
        tree_widths: Sequence[int] | None,
        draft_quantization: str = "auto",
        draft_min_prob: float = 0.0,
    ) -> None:
        self.needs = Needs(lookahead_slots=largest.num_nodes, draft_probs=draft_sampling == "sampled")
        how = Drafting(draft_sampling, tree_widths, draft_quantization, draft_min_prob)
        self._drafter = make_drafter(services, model, num_draft_layers, how)
        target = services.decoder
        if isinstance(target, PaddedDecoder) and tree_widths is None and draft_sampling != "sampled":
            draft = self._drafter.round_draft(target, round_room(services, largest))
            if draft is not None:
                self._rounds = SizedRounds("draft_model", draft, target, largest, size_by_price=False)

    def propose(self, step: StepContext, budgets: Sequence[Budget]) -> list[DraftTree]:
        return self._drafter.draft(step.requests, budgets)

    def observe(self, step: StepContext) -> None:
        super().observe(step)
        if step.drafted is not None:  # elsewhere trees may be those of several drafters
            self._drafter.follow(step.passes)
        for request in step.gone:
            self._drafter.forget(request)


class OwnLayersDrafter:
    """The target's first layers, on the target's KV."""

    def __init__(self, services: EngineParts, num_layers: int, how: Drafting) -> None:
        assert services.decoder is not None and services.kv_cache is not None
        available = services.decoder.config.num_layers
        if num_layers > available:
            raise InvalidOptionError(f"num_draft_layers is {num_layers}, but the target has only {available} layers")
        self._layers, self._sampling = range(num_layers), how.sampling
        self._drafter = ModelDrafter(
            services.decoder,
            services.kv_cache,
            services.block_size,
            layers=self._layers,
            widths=how.widths,
            sampling=how.sampling,
            min_prob=how.min_prob,
        )

    def draft(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        return self._drafter.draft(requests, budgets, [request.num_tokens - 1 for request in requests])

    def forget(self, request: Request) -> None:
        pass

    def round_draft(self, target: PaddedDecoder, room: RoundRoom) -> ChainRoundDraft | None:
        return own_layers_draft(target, self._layers, room, self._sampling)

    def follow(self, passes: Sequence[RequestPass]) -> None:
        pass


class SeparateDrafter:
    """Another model with the target's tokens, its KV in the same block tables."""

    def __init__(
        self,
        services: EngineParts,
        decoder: Decoder,
        how: Drafting,
        capture: Callable[[PassRoom], PaddedDecoder] | None = None,  # where its passes can be captured
    ) -> None:
        self._is_chain = how.widths is None
        self._fed: dict[str, Fed] = {}
        self._sampling, self._capture = how.sampling, capture
        self._drafter = ModelDrafter(
            decoder,
            allocate(decoder, services),
            services.block_size,
            widths=how.widths,
            sampling=how.sampling,
            vocab_size=services.vocab_size,
            min_prob=how.min_prob,
        )

    def draft(self, requests: Sequence[Request], budgets: Sequence[Budget]) -> list[DraftTree]:
        starts = [self._fed.get(r.request_id, Fed()).valid(r.token_ids) for r in requests]
        trees = self._drafter.draft(requests, budgets, starts)
        for request, tree in zip(requests, trees, strict=True):
            if tree:
                # Of a chain every token but the last was fed, in the slots it would have if it were accepted.
                chain = tree.token_ids[:-1] if self._is_chain else []
                self._fed[request.request_id] = Fed(request.num_tokens, chain)
        return trees

    def forget(self, request: Request) -> None:
        self._fed.pop(request.request_id, None)

    def round_draft(self, target: PaddedDecoder, room: RoundRoom) -> ChainRoundDraft | None:
        if self._capture is None or self._drafter.decoder.config.vocab_size != target.config.vocab_size:
            return None
        model = self._capture(replace(target.room, kv_cache=self._drafter.kv_cache, max_rows=2 * room.max_requests))
        greedy = self._sampling == "greedy"
        return ChainRoundDraft(model, target, room, has_own_keys=True, greedy=greedy, knows=self._knows)

    def follow(self, passes: Sequence[RequestPass]) -> None:
        for seen in passes:
            if seen.draft:
                self._fed[seen.request.request_id] = Fed(seen.start + 1, seen.draft.token_ids[:-1])

    def _knows(self, request: Request) -> bool:
        """Its last draft was of the text as it is now."""
        fed = self._fed.get(request.request_id)
        return fed is not None and fed.num_tokens == request.num_tokens


def make_drafter(services: EngineParts, model: Any, num_layers: int | None, how: Drafting) -> Drafter:
    if num_layers is not None:
        return OwnLayersDrafter(services, num_layers, how)
    if model is None or (isinstance(model, str) and is_distilled(model)):
        return SeparateDrafter(services, load_distilled(services, model), how)
    from paceline.spec.model.foreign_drafter import ForeignDrafter, same_tokens

    loaded = _load(services, model, how) if isinstance(model, str) else model
    if same_tokens(services, loaded):
        capture = loaded.capture if isinstance(loaded, LoadedModel) else None
        return SeparateDrafter(services, loaded.decoder, how, capture)
    return ForeignDrafter(services, loaded, how.sampling, how.widths)


def _load(services: EngineParts, model: str, how: Drafting) -> LoadedModel:
    """The model as its file has it, or on the native kernels in 4 bits."""
    from paceline.models.loader import load_model

    if how.quantization != "file" and placement(services).is_native:
        from paceline.models.drafters.lean_model import can_be_lean, is_large, load_lean_model
        from paceline.models.loading import load_config
        from paceline.models.resolve import resolve_model

        path = resolve_model(model, progress=False)
        fits = can_be_lean(load_config(path))
        if fits and (how.quantization == "int4" or is_large(path)):
            return load_lean_model(model, path, num_threads=services.num_threads)
    if how.quantization == "int4":
        raise InvalidOptionError(
            f"draft_quantization 'int4' is for the native CPU kernels, which do not run {model} here: leave it out"
        )
    return load_model(model, num_threads=services.num_threads, quiet=True)


def is_distilled(model: str) -> bool:
    """One of our drafter files, or a test's stand-in for one, and not a whole model."""
    path = Path(model).expanduser()
    return model == UNTRAINED or path.suffix == ".safetensors" or (path / "draft.safetensors").is_file()


def load_distilled(services: EngineParts, model: str | None) -> Decoder:
    from paceline.models.drafters.distilled_decoder import DistilledDecoder

    target = target_of(services)
    return DistilledDecoder(load_network("draft", model, target), target, placement(services))


def allocate(decoder: Decoder, services: EngineParts) -> Tensor:
    """A drafting model's own KV: [layers, 2, slots, kv_heads, head_dim]."""
    pool = allocate_kv(decoder.config, services.num_slots, decoder.dtype, decoder.device)
    touch(pool, slice(0, services.first_slots))
    return pool
