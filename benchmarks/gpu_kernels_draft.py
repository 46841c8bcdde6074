"""Whole EAGLE-3 drafts on the device, for benchmarks/gpu_kernels.py: time by batch and by kernel, and the host's share.

A random drafter of the target's shape. Chains of CHAIN levels and trees of WIDTH paths and TREE_LEVELS levels, behind
contexts as long as the other sections have. The limit is weights and keys, read once a level, over the bandwidth.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from gpu_kernels_setup import BLOCK_SIZE, Clock
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.models.drafters.eagle3 import Eagle3, Eagle3Config
from paceline.models.drafters.joined import DraftWeights, joined_weights
from paceline.models.rope import rope_tables
from paceline.spec.buckets import BUCKETS
from paceline.spec.engine_parts import EngineParts
from paceline.spec.feature.captured_drafts import DRAFT_CLOCK, CapturedDrafts
from paceline.spec.feature.draft_inputs import DraftInputs, DraftViews, RequestInts
from paceline.spec.feature.draft_levels import DraftRoom, DraftShape, PlainDraft
from paceline.spec.feature.draft_scores import DraftScores
from paceline.spec.feature.draft_writer import Wanted
from paceline.spec.feature.feature_queue import FeatureQueue
from paceline.spec.feature.fused_draft import FusedDraft, Launch
from paceline.spec.proposer import Budget, RequestPass, StepContext
from paceline.spec.tree_answers import read_trees

CHAIN, TREE_LEVELS, WIDTH, NUM_NODES = 6, 4, 8, 24
BATCHES = (1, 8, 32, 128)
DRAFT_VOCAB = {"135m": 16384, "1.5b": 32768, "tiny": 70}
HIDDEN_LAYERS = (2, 15, 27)  # any three
HOST_STEPS = 100


@dataclass(frozen=True)
class Drafter:
    """A drafter, and requests to draft for that have all but the newest two of their keys."""

    weights: DraftWeights
    room: DraftRoom
    services: EngineParts
    scores: DraftScores
    context: int

    def views(self, count: int) -> DraftViews:
        """Inputs of `count` requests, each with two new pairs."""
        device, pairs = self.room.kv.device, self.room.num_pairs
        inputs = DraftInputs(count, pairs, self.room.num_levels, device)
        host = inputs.host(count)
        slots = _slots(count, self.context)  # [requests, keys]
        host.pairs("slots")[:, -2:] = slots[:, -2:]
        host.pairs("positions")[:, -2:] = range(self.context - 2, self.context)
        host.pairs("next_tokens")[:, -2:] = np.arange(2 * count).reshape(count, 2) % self.weights.config.vocab_size
        whole = (WIDTH, self.room.num_levels, self.room.num_nodes)
        host.requests()[:] = [RequestInts(2, i, self.context, *whole) for i in range(count)]
        host.floats("lowest")[:] = -1e29
        host.floats("followed")[:] = -np.inf
        inputs.send(count)
        generator = torch.Generator(device=device).manual_seed(3)
        hidden = torch.randn(count * pairs, self.weights.feature_size, generator=generator, device=device)
        constants = torch.from_numpy(self.scores.id_constants.view(np.int32).copy()).to(device)
        table = torch.from_numpy(slots).to(device)
        return inputs.views(count, hidden.to(self.weights.dtype), table, constants)


def _slots(count: int, length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    blocks = np.arange(count * -(-length // BLOCK_SIZE), dtype=np.int32).reshape(-1, count).T  # far from each other
    return (blocks[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE, dtype=np.int32)).reshape(count, -1)[:, :length]


def make_drafter(name: str, target: ModelConfig, context: int, device: torch.device, dtype: torch.dtype) -> Drafter:
    torch.manual_seed(5)
    layer = replace(target, num_layers=1, qkv_bias=False)
    network = Eagle3(Eagle3Config(layer, target.hidden_size, DRAFT_VOCAB[name], HIDDEN_LAYERS)).to(device)
    embedding = torch.randn(target.vocab_size, target.hidden_size, device=device).to(dtype)
    cos, sin = (part.to(device) for part in rope_tables(layer))
    weights = joined_weights(network, embedding, dtype, (cos, sin))
    num_slots = BUCKETS[-1] * (-(-(context + 4 * HOST_STEPS) // BLOCK_SIZE)) * BLOCK_SIZE
    shape = (2, num_slots + BUCKETS[-1] * WIDTH * CHAIN + 1, layer.num_kv_heads, layer.head_dim)
    room = DraftRoom(torch.randn(shape, device=device), num_slots, BUCKETS[-1], CHAIN + 1, WIDTH, CHAIN, NUM_NODES)
    services = EngineParts(target.vocab_size, context + 4 * HOST_STEPS, BLOCK_SIZE, num_slots, device)
    scores = DraftScores(network.d2t, target.vocab_size, None)
    return Drafter(weights, room, services, scores, context)


def draft_figures(drafter: Drafter, clock: Clock, pdls: dict[str, int], bandwidth: float, tiny: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    batches, shapes = ((2,), ((1, 2), (WIDTH, 2))) if tiny else (BATCHES, ((1, CHAIN), (WIDTH, TREE_LEVELS)))
    for part, made in (
        ("agreement", lambda: agreement(drafter, batches[:2], shapes)),
        ("ms", lambda: times(drafter, clock, pdls, bandwidth, batches, shapes)),
        ("us by kernel", lambda: by_kernel(drafter, clock, batches, shapes)),
        ("host", lambda: host_times(drafter, batches, tiny)),
    ):
        try:
            result[part] = made()
        except Exception:
            traceback.print_exc()
    return result


Shapes = Sequence[tuple[int, int]]  # (width, levels)


def agreement(drafter: Drafter, batches: Sequence[int], shapes: Shapes) -> dict[str, Any]:
    """How many nodes of the plain twin's trees the kernels' trees have too."""
    result: dict[str, Any] = {}
    for count in batches:
        for width, levels in shapes:
            views, shape = drafter.views(count), DraftShape(count, width, levels)
            kinds = FusedDraft(drafter.weights, drafter.room), PlainDraft(drafter.weights, drafter.room)
            found, expected = (read_trees(kind.run(views, shape).cpu().numpy()) for kind in kinds)
            alike = sum(_common(tree.token_ids, other.token_ids) for tree, other in zip(found, expected, strict=True))
            result[f"{count} x {width} x {levels}"] = alike / max(1, sum(len(tree) for tree in expected))
    print(f"  nodes as in the plain twin, by (batch x width x levels): {result}", flush=True)
    return result


def _common(some: list[int], others: list[int]) -> int:
    return len(set(some) & set(others)) + len(others) - len(set(others))


def times(
    drafter: Drafter, clock: Clock, pdls: dict[str, int], bandwidth: float, batches: Sequence[int], shapes: Shapes
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for label, pdl in pdls.items():
        fused = FusedDraft(drafter.weights, drafter.room, pdl=pdl)
        for width, levels in shapes:
            for count in batches:
                views, shape = drafter.views(count), DraftShape(count, width, levels)
                name = f"width {width}, {levels} levels, batch {count}, pdl {label}"
                launches = fused.launches(views, shape)
                took_ms = clock.time_ms(_together(launches))
                limit_ms = levels * _bytes_of_level(drafter, count) / bandwidth * 1e3
                result[name] = {"ms": took_ms, "limit": limit_ms, "calls": len(launches)}
                print(f"  {name:46} {took_ms:7.3f} ms (limit {limit_ms:.3f}), {len(launches)} calls", flush=True)
    return result


def by_kernel(drafter: Drafter, clock: Clock, batches: Sequence[int], shapes: Shapes) -> dict[str, Any]:
    """Microseconds of one call, each kind alone in a graph; "head" is the product and what joins its stretches."""
    result: dict[str, Any] = {}
    fused = FusedDraft(drafter.weights, drafter.room)
    for width, levels in shapes:
        for count in batches:
            launches = fused.launches(drafter.views(count), DraftShape(count, width, levels))
            kinds = list(dict.fromkeys(launch.kind for launch in launches))
            cells = {}
            for kind in kinds:
                own = [launch for launch in launches if launch.kind == kind]
                cells[kind] = clock.time_ms(_together(own)) * 1e3 / len(own)
            if not result:
                print("  " + f"{'us per call':28}" + "".join(f"{kind:>11}" for kind in cells))
            result[f"width {width}, {levels} levels, batch {count}"] = cells
            figures = "".join(f"{value:11.2f}" for value in cells.values())
            print(f"  {f'width {width}, {levels} levels, batch {count}':28}{figures}", flush=True)
    return result


def _together(launches: Sequence[Launch]) -> Callable[[], None]:
    def launch() -> None:
        for one in launches:
            one.call()

    return launch


def _bytes_of_level(drafter: Drafter, count: int) -> float:
    weights = drafter.weights
    linears = (weights.qkv, weights.output, weights.gate_up, weights.down)
    products = sum(linear.weight.numel() for linear in linears) + weights.head.numel()
    keys = 2 * count * drafter.context * weights.config.kv_size
    return products * weights.dtype.itemsize + 4.0 * keys


def host_times(drafter: Drafter, batches: Sequence[int], tiny: bool) -> dict[str, Any]:
    """Microseconds of the host per draft, by part, along the way that the engine goes; and what capturing took."""
    result: dict[str, Any] = {}
    begin_s, free = time.perf_counter(), _free_bytes(drafter)
    fused = FusedDraft(drafter.weights, drafter.room)
    drafts = CapturedDrafts(
        fused,
        drafter.room,
        drafter.scores,
        max_length=drafter.services.max_model_len,
        feature_size=drafter.weights.feature_size,
        feature_dtype=drafter.weights.dtype,
    )
    result["start"] = {"s": time.perf_counter() - begin_s, "bytes": free - _free_bytes(drafter)}
    print(
        f"  buffers and all graphs: {result['start']['s']:.1f} s, {result['start']['bytes'] / 1e6:.0f} MB", flush=True
    )
    for count in batches:
        before = asdict(DRAFT_CLOCK)
        num_steps = 2 if tiny else HOST_STEPS
        spent = _run_steps(drafter, drafts, count, num_steps)
        parts = {name: value - before[name] for name, value in asdict(DRAFT_CLOCK).items() if name.endswith("_s")}
        cells = {name: seconds / num_steps * 1e6 for name, seconds in (spent | parts).items()}
        result[f"batch {count}"] = cells
        print(f"  host us a draft, batch {count:3}: " + ", ".join(f"{k} {v:.0f}" for k, v in cells.items()), flush=True)
    return result


def _run_steps(drafter: Drafter, drafts: CapturedDrafts, count: int, num_steps: int) -> dict[str, float]:
    """Requests that get three tokens a step, with a chain as budget."""
    services, device = drafter.services, drafter.room.kv.device
    queue = FeatureQueue(HIDDEN_LAYERS, services)
    blocks_each = services.max_model_len // BLOCK_SIZE
    uses = np.ones(services.num_slots // BLOCK_SIZE, dtype=np.int32)
    requests = []
    for i in range(count):
        request = Request(f"{count}-{i}", [7] * drafter.context, SamplingParams(temperature=0.0), 4 * HOST_STEPS, i)
        request.block_ids = list(range(i * blocks_each, (i + 1) * blocks_each))
        requests.append(request)
    hidden = torch.zeros(3 * count, 3, drafter.weights.config.hidden_size, dtype=drafter.weights.dtype, device=device)
    spent = {"observe": 0.0, "launch to collect": 0.0}
    for _ in range(num_steps):
        step = _next_step(requests, hidden, uses)
        begin_s = time.perf_counter()
        newest = queue.follow_lazily(step, lambda: None)
        assert newest is not None
        queue.leave_out(newest, [request.request_id for request in requests], drafts.num_pairs)
        queue.take()
        observed_s = time.perf_counter()
        asked = [request for request in requests if drafts.suit(request)]
        wanted = [Wanted(request, Budget(CHAIN, CHAIN), 1, -1e29, -1e29) for request in asked]
        drafts.launch(wanted, newest, queue).collect()
        spent["observe"] += observed_s - begin_s
        spent["launch to collect"] += time.perf_counter() - observed_s
    return spent


def _next_step(requests: list[Request], hidden: Tensor, uses: np.ndarray[Any, np.dtype[np.int32]]) -> StepContext:
    passes = []
    for i, request in enumerate(requests):
        start = request.num_tokens - 1
        request.token_ids.extend([5, 6, 7])
        seen = RequestPass(request, range(3 * i, 3 * i + 3), start, 1, accepted=[0, 1])
        seen.block_ids = tuple(request.block_ids)
        passes.append(seen)
    return StepContext(requests, passes, [], None, hidden, HIDDEN_LAYERS, uses)


def _free_bytes(drafter: Drafter) -> int:
    device = drafter.room.kv.device
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
