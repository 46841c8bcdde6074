"""The search for good tiles of packed weights, for benchmarks/gpu_quantization.py."""

import itertools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from gpu_kernels_setup import Clock
from gpu_kernels_tune import (
    BYTES_IN_TURN,
    SHARED_BYTES,
    Product,
    compile_in_parallel,
    launcher,
    precompile,
    products_of,
)

from paceline.models.decoder import Decoder
from paceline.ops.packed import PARTS
from paceline.ops.triton.tiles import PACKED_WASTE, ROWS, Cut, Tile, packed_tile


def candidates(product: Product, quick: bool) -> list[Cut]:
    kind, group = product.kind_of_values, product.group
    if quick:
        into = packed_tile(kind, product.num_out, product.num_in, group).into
        return [Cut(ROWS, Tile(16, into, 2, 3)), Cut(ROWS, Tile(32, into, 4, 3))]
    outs = [32, 64, 128] if product.kind == "head" else [16, 32, 64]
    splits = {"output": [1, 2], "down": [4, 5, 7]}.get(product.kind, [1])
    intos = [into for into in (128, 64, 32, 16) if group >= product.num_in or group % into == 0]
    intos = [into for into in intos if into * PARTS[kind] <= 256][:2]
    found = []
    for out, into, warps, stages, split in itertools.product(outs, intos, [2, 4], [3, 5], splits):
        step = into * PARTS[kind]
        padded = -(-product.num_in // step) * step
        fits = (16 * step + out * into) * 2 * (stages - 1) < SHARED_BYTES
        suits = padded <= PACKED_WASTE * product.num_in and out <= product.heads.dim * 2
        if fits and suits and out >= 8 * warps:
            found.append(Cut(ROWS, Tile(out, into, warps, stages, split, outs_first=out >= 64 and warps == 4)))
    return found


def tune_formats(
    decoder: Callable[[str], Decoder], forms: list[str], only: list[str], *, quick: bool
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    products: dict[tuple[Any, ...], Product] = {}
    for form in forms:
        for product in products_of(decoder(form)):
            if product.kind_of_values != "plain" and (not only or product.kind in only):
                key = (product.kind, product.kind_of_values, product.num_out, product.num_in)
                products.setdefault(key, product)  # the first format's group size
    if any(product.device.startswith("cuda") for product in products.values()):
        work = [(p, ROWS, candidates(p, quick)[i::6]) for p in products.values() for i in range(6)]
        compile_in_parallel(work, precompile)
    for product in products.values():
        name = f'("{product.kind_of_values}", {product.num_out}, {product.num_in})'
        result[name] = timed(product, quick)
        for cells in result[name][:4]:
            tile = replace(
                Tile(1, 1, 1, 1),
                **{key: cells[key] for key in ("out", "into", "warps", "stages", "splits", "outs_first")},
            )
            arguments = f"{tile.out}, {tile.into}, {tile.warps}, {tile.stages}"
            arguments += f", splits={tile.splits}" if tile.splits > 1 else ""
            arguments += ", outs_first=True" if tile.outs_first else ""
            figures = (
                f"{product.kind}, group {product.group}: {cells['us']:.2f} us at 16 rows, {cells['us_1_row']:.2f} at 1"
            )
            print(f"    {name}: Tile({arguments}),  # {figures}", flush=True)
    return result


def timed(product: Product, quick: bool) -> list[dict[str, Any]]:
    """The best tiles at 16 rows, and what they take at one."""
    bits = 4 if product.kind_of_values == "int4" else 8
    size = product.num_out * product.num_in * bits // 8
    copies = 1 if quick else max(2, min(200, -(-BYTES_IN_TURN // size)))
    clock = Clock(torch.device(product.device), replays=4, rounds=3)
    made: list[tuple[float, Cut]] = []
    make, failures = launcher(product, ROWS, copies), 0
    for cut in candidates(product, quick):
        try:
            made.append((clock.time_ms(make(cut)) * 1e3 / copies, cut))
        except Exception as error:
            failures += 1
            if failures == 1:
                print(f"    {cut}: {type(error).__name__} {str(error)[:120]}")
    made.sort(key=lambda pair: pair[0])
    one_row = launcher(product, 1, copies)
    return [
        {"us": took_us, "us_1_row": clock.time_ms(one_row(cut)) * 1e3 / copies, **asdict(cut.tile)}
        for took_us, cut in made[:4]
    ]
