"""Time by kind of kernel, and the search for good tiles, for benchmarks/gpu_kernels.py."""

import itertools
import multiprocessing
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from gpu_kernels_setup import Clock
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.models.decoder import Decoder
from paceline.models.fused_cuts import SCALES_FROM
from paceline.models.fused_decoder import FusedDecoder, attention_rows
from paceline.ops.packed import PARTS, PackedWeight, Weight
from paceline.ops.triton.fused_head import RowNoise, head_tiles, head_tokens
from paceline.ops.triton.fused_linear import linear_residual, split_sizes
from paceline.ops.triton.fused_mlp import norm_gate_up_silu
from paceline.ops.triton.fused_qkv import Heads, norm_qkv_rope
from paceline.ops.triton.norm_rows import scale_rows
from paceline.ops.triton.split_attention import AttentionScratch, Programs, Steps, split_tree_attention
from paceline.ops.triton.tiles import ROWS, Cut, Tile, tile_for

Launch = Callable[[], None]
SHARED_BYTES = 220_000  # of a Hopper multiprocessor
BYTES_IN_TURN = 150_000_000  # weights of one timing: more than the L2 cache keeps


def kind_launches(
    fused: FusedDecoder, batch: ForwardBatch, kv: Tensor, noise: RowNoise
) -> dict[str, tuple[Launch, int]]:
    """Kind -> (a launch of that kind alone in all layers, or of all but that kind, how many kernels it stands for)."""
    rows = attention_rows(batch)
    buffers = fused.allocate(batch.num_rows, rows.max_splits())
    num_layers = fused.config.num_layers
    fused.run(batch.token_ids, rows, kv, buffers)
    layer_kinds: dict[str, Callable[[int], None]] = {
        "qkv": lambda i: fused.launch_qkv(i, rows, kv[i], buffers),
        "attention": lambda i: fused.launch_attention(i, rows, kv[i], buffers),
        "output": lambda i: fused.launch_output(i, buffers),
        "gate_up": lambda i: fused.launch_gate_up(i, buffers),
        "down": lambda i: fused.launch_down(i, buffers, i + 1 if i + 1 < num_layers else None),
    }

    def all_layers(kinds: list[str]) -> Launch:
        def launch() -> None:
            for i in range(num_layers):
                for kind in kinds:
                    layer_kinds[kind](i)

        return launch

    launches: dict[str, tuple[Launch, int]] = {kind: (all_layers([kind]), num_layers) for kind in layer_kinds}
    for left_out in layer_kinds:
        others = [kind for kind in layer_kinds if kind != left_out]
        launches[f"-{left_out}"] = (all_layers(others), num_layers)
    launches["layer"] = (all_layers(list(layer_kinds)), num_layers)
    launches["tokens"] = (lambda: fused.write_tokens(batch.logits_rows, noise, buffers), 1)
    launches["greedy"] = (lambda: fused.write_tokens(batch.logits_rows, None, buffers), 1)
    return launches


@dataclass(frozen=True)
class Product:
    """A kind of product with a weight's shape, for the search."""

    kind: str
    num_out: int
    num_in: int
    heads: Heads
    has_bias: bool
    device: str
    dtype: torch.dtype
    kind_of_values: str = "plain"  # or a packed weight's: ops/packed.py
    group: int = 0  # inputs under one scale
    scales_sums: bool = False


def products_of(base: Decoder) -> list[Product]:
    layer, config = base.layers[0], base.config
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    linears = {
        "qkv": layer.qkv,
        "output": layer.output,
        "gate_up": layer.gate_up,
        "down": layer.down,
        "head": base.head,
    }
    return [
        Product(
            kind,
            num_out=linear.weight.shape[0],
            num_in=linear.weight.shape[1],
            heads=heads,
            has_bias=linear.bias is not None,
            device=str(base.device),
            dtype=base.dtype,
            kind_of_values=linear.weight.kind if isinstance(linear.weight, PackedWeight) else "plain",
            group=linear.weight.group if isinstance(linear.weight, PackedWeight) else 0,
            scales_sums=isinstance(linear.weight, PackedWeight) and linear.weight.scales_sums,
        )
        for kind, linear in linears.items()
    ]


def launcher(product: Product, num_rows: int, copies: int) -> Callable[[Cut], Launch]:
    """A function that gives, for a cut, a launch of the product over `copies` weights."""
    device, dtype = product.device, product.dtype

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def ints(count: int) -> Tensor:
        return torch.arange(count, dtype=torch.int32, device=device)

    weights: list[Weight] = []  # of the cut that came last, where steps have weights of their own

    def prepare(cut: Cut) -> list[Weight]:
        if product.kind_of_values == "plain":
            if not weights:
                weights.extend(random(product.num_out, product.num_in) * 0.02 for _ in range(copies))
        elif not weights or isinstance(weights[0], Tensor) or weights[0].into != cut.tile.into:
            weights.clear()
            weights.extend(random_packed(product, cut.tile.into) for _ in range(copies))
        return list(weights)

    bias = random(product.num_out) if product.has_bias else None
    x, rows, scales = random(num_rows, product.num_in), ints(num_rows), torch.ones(num_rows, device=device)
    stream = x if product.kind_of_values == "plain" else random(num_rows, product.num_in)
    heads = product.heads
    dim = heads.dim

    def of_all(cut: Cut, call: Callable[[Weight], None]) -> Launch:
        own = prepare(cut)
        return lambda: [call(weight) for weight in own] and None

    def found_before(cut: Cut) -> Tensor | None:
        """Its time counts with the product's."""
        if cut.rows < SCALES_FROM:
            return None
        scale_rows(x, scales, 1e-6)
        return scales

    def qkv(cut: Cut) -> Launch:
        cos = torch.ones(64 + num_rows, dim // 2, device=device)
        query, kv = random(num_rows, heads.num_q, dim), random(2, num_rows, heads.num_kv, dim)

        def call(w: Weight) -> None:
            norm_qkv_rope(
                x, stream, w, bias, None, cos, cos, rows, rows, query, kv, heads, 1e-6, cut.tile,
                scales=found_before(cut), row_tile=cut.rows,
            )  # fmt: skip

        return of_all(cut, call)

    def residual(cut: Cut) -> Launch:
        hidden = torch.zeros(num_rows, product.num_out, dtype=dtype, device=device)
        num_parts, num_arrivals = split_sizes(num_rows, product.num_out, cut.tile)
        parts = torch.empty(num_parts, device=device)
        arrivals = torch.zeros(num_arrivals, dtype=torch.int32, device=device)
        return of_all(cut, lambda w: linear_residual(x, w, bias, hidden, parts, arrivals, cut.tile, row_tile=cut.rows))

    def gate_up(cut: Cut) -> Launch:
        out = random(num_rows, product.num_out // 2)

        def call(w: Weight) -> None:
            norm_gate_up_silu(
                x, stream, w, bias, out, 1e-6, cut.tile, scales=found_before(cut), row_tile=cut.rows
            )  # fmt: skip

        return of_all(cut, call)

    def head(cut: Cut) -> Launch:
        shares = head_tiles(product.num_out, cut.tile)
        scores, ids = torch.empty(num_rows, shares, device=device), ints(num_rows * shares).view(num_rows, shares)
        best, tokens = torch.empty(num_rows, device=device), ints(num_rows)
        return of_all(cut, lambda w: head_tokens(x, w, scores, ids, tokens, best, None, cut.tile, row_tile=cut.rows))

    return {"qkv": qkv, "output": residual, "gate_up": gate_up, "down": residual, "head": head}[product.kind]


def random_packed(product: Product, into: int) -> PackedWeight:
    parts = PARTS[product.kind_of_values]
    width = -(-product.num_in // (into * parts)) * into
    words = torch.randint(-(1 << 15), 1 << 15, (product.num_out, width), dtype=torch.int16, device=product.device)
    if product.kind_of_values == "fp8":
        words &= 0x3F3F  # no NaN
    pairs = torch.tensor([1.0, 8.0], dtype=torch.float16, device=product.device).view(torch.int32)
    scales = pairs.repeat(1 + max(1, product.num_in // product.group), product.num_out)
    scales[0] = torch.tensor([0.01], device=product.device).view(torch.int32)
    shape = (product.num_out, product.num_in)
    return PackedWeight(
        words, scales, product.kind_of_values, product.group, into, shape, product.dtype, product.scales_sums
    )


def candidates(product: Product, num_rows: int, quick: bool) -> list[Cut]:
    shares = product.kind in ("output", "down")
    if quick:
        return [Cut(16, Tile(16, 32, 2, 3)), Cut(16, Tile(32, 16, 4, 3, splits=2 if shares else 1))]
    splits = {"down": [1, 4, 5, 7]}.get(product.kind, [1])  # splits show in the bits: one for all numbers of rows
    own = tile_for(product.num_out, product.num_in, product.dtype)
    tried = [own, *(Tile(out, into, 2, stages) for out, into, stages in FEW_ROWS)] if num_rows <= 128 else []
    found = [Cut(ROWS, tile) for tile in tried]
    found += [Cut(rows, Tile(out, into, warps, stages)) for rows, out, into, warps, stages in ROWS_FIRST]
    found += [
        Cut(rows, Tile(out, into, warps, stages, outs_first=True)) for rows, out, into, warps, stages in OUTS_FIRST
    ]
    return [
        replace(cut, tile=replace(cut.tile, splits=split))
        for cut, split in itertools.product(dict.fromkeys(found), splits)
        if cut.rows < 2 * num_rows and cut.rows * 32 >= num_rows and product.num_in >= 2 * split * cut.tile.into
    ]


# Outputs, inputs and stages of programs of 16 rows and two warps
FEW_ROWS = [(16, 64, 5), (16, 128, 4), (16, 256, 4), (32, 64, 4), (32, 128, 3), (64, 64, 3), (64, 128, 3)]
# Rows, outputs, inputs, warps and stages
ROWS_FIRST = [
    (32, 32, 64, 2, 4), (32, 64, 64, 2, 3), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4), (64, 128, 64, 4, 3),
    (64, 256, 64, 4, 3), (128, 64, 64, 4, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3),
]  # fmt: skip
OUTS_FIRST = [
    (16, 64, 64, 4, 5), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (32, 64, 64, 4, 4), (32, 64, 128, 4, 4),
    (32, 128, 64, 4, 3), (64, 64, 64, 4, 4), (64, 64, 128, 4, 3), (64, 128, 64, 8, 3), (64, 128, 64, 4, 3),
    (128, 64, 64, 4, 4), (128, 128, 64, 8, 3),
]  # fmt: skip


def precompile(product: Product, num_rows: int, cuts: list[Cut]) -> None:
    """In a process of its own: launch each cut once, so that the kernel cache on disk has it."""
    make = launcher(product, num_rows, 1)
    for cut in cuts:
        try:
            make(cut)()
        except Exception:  # one that does not fit: the timing reports it
            continue
    torch.cuda.synchronize()


def compile_in_parallel(work: list[tuple[Any, ...]], function: Callable[..., None], workers: int = 12) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = [pool.submit(function, *arguments) for arguments in work]
        for future in futures:
            try:
                future.result(timeout=200)
            except Exception:
                traceback.print_exc()


def tune_products(base: Decoder, clock: Clock, only: list[str], *, quick: bool) -> dict[str, Any]:
    products = [product for product in products_of(base) if not only or product.kind in only]
    counts = [16] if quick else [16, 32, 64, 128, 256, 512, 2048]
    if base.device.type == "cuda":
        work = [
            (p, 128, every[part::6])
            for p in products
            for every in [list(dict.fromkeys(cut for rows in counts for cut in candidates(p, rows, quick)))]
            for part in range(6)
        ]
        compile_in_parallel(work, precompile)
    result: dict[str, Any] = {}
    for product, num_rows in itertools.product(products, counts):
        size = product.num_out * product.num_in * product.dtype.itemsize
        copies = 1 if quick else max(2, min(200, -(-BYTES_IN_TURN // size)))
        fast_clock = Clock(base.device, replays=4, rounds=3)
        timed: list[tuple[float, Cut]] = []
        make, failures = launcher(product, num_rows, copies), 0
        for cut in candidates(product, num_rows, quick):
            try:
                timed.append((fast_clock.time_ms(make(cut)) * 1e3 / copies, cut))
            except Exception as error:
                failures += 1
                if failures == 1:
                    print(f"    {cut}: {type(error).__name__} {str(error)[:120]}")
        timed.sort(key=lambda pair: pair[0])
        label = f"{product.kind} {product.num_out}x{product.num_in}, {num_rows} rows"
        print(f"  {label} ({failures} of {failures + len(timed)} cuts failed)")
        for took_us, cut in timed[:5]:
            print(f"    {took_us:8.2f} us: {cut}", flush=True)
        result[label] = [{"us": took_us, **asdict(cut)} for took_us, cut in timed]
        del make
    return result


def attention_launch(base: Decoder, batch: ForwardBatch, kv: Tensor, steps: Steps, warps: int, parts: int) -> Launch:
    """Row by row; blocks of prompt rows are gpu_attention.py's."""
    config, rows = base.config, attention_rows(batch)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    query = torch.randn(batch.num_rows, heads[0], heads[2], device=base.device).to(base.dtype)
    out = torch.empty_like(query)
    size = batch.num_rows * heads[0] * rows.max_splits(steps)
    scratch = AttentionScratch(
        best=torch.empty(size, device=base.device),
        total=torch.empty(size, device=base.device),
        mixed=torch.empty(size * heads[2], device=base.device),
        arrivals=torch.zeros(batch.num_rows * heads[1], dtype=torch.int32, device=base.device),
    )
    scale = heads[2] ** -0.5
    programs = Programs(parts, block_rows=1, block_lines=16, block_parts=1, warps=warps)

    def launch() -> None:
        for layer in kv:
            split_tree_attention(query, layer, out, rows, scratch, None, scale, programs=programs, steps=steps)

    return launch


def tune_attention(
    base: Decoder, batches: dict[int, ForwardBatch], kv: Tensor, clock: Clock, *, quick: bool
) -> dict[str, Any]:
    options = list(itertools.product([32, 64, 128], [2, 4], [1, 2, 4]))
    if quick:
        options = [(16, 4, 2), (32, 4, 1)]
    fast_clock = Clock(base.device, replays=4, rounds=3)
    result: dict[str, Any] = {}
    for num_rows, batch in batches.items():
        timed = []
        for keys, warps, parts in options:
            steps = Steps(keys)
            try:
                took_ms = fast_clock.time_ms(attention_launch(base, batch, kv, steps, warps, parts))
                timed.append((took_ms * 1e3 / len(kv), keys, warps, parts))
            except Exception as error:
                print(f"    {steps} warps {warps} parts {parts}: {type(error).__name__} {str(error)[:120]}")
        timed.sort(key=lambda item: item[0])
        print(f"  attention at {num_rows} rows")
        for took_us, keys, warps, parts in timed[:8]:
            print(f"    {took_us:8.2f} us: {keys} keys, {warps} warps, {parts} programs a row and head", flush=True)
        result[f"{num_rows} rows"] = [{"us": t, "keys": k, "warps": w, "parts": p} for t, k, w, p in timed[:8]]
    return result
