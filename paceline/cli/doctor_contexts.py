"""`paceline doctor --contexts 128 512 2048 8000`: plain decoding by the length of its context, beside the limit.

A token reads all weights once, and the keys and values of everything before it. The limit is what that takes at the
measured memory bandwidth. Contexts take turns, so that a slow moment hits all of them.
"""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.models.loader import LoadedModel


def by_context(
    model: "LoadedModel", bandwidth: float | None, contexts: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """bandwidth: bytes per second, None where it is not known"""
    from paceline.cli.doctor import BLOCK_SIZE, chain_pass, time_pass
    from paceline.core.kv_tensor import allocate_kv
    from paceline.kv.storage import kv_bytes_per_token
    from paceline.models.native import NativeDecoder

    decoder, config = model.decoder, model.config
    if not all(0 < context < config.max_position for context in contexts):
        raise InvalidOptionError(
            f"--contexts must be from 1 to {config.max_position - 1}, for {model.name} knows {config.max_position} "
            f"positions; given {' '.join(map(str, contexts))}"
        )
    num_blocks = -(-(max(contexts) + 1) // BLOCK_SIZE)
    cache = allocate_kv(config, num_blocks * BLOCK_SIZE, decoder.dtype, decoder.device)
    cache.zero_()  # untouched memory is all one page of zeros, which is read from the caches
    batches = {context: chain_pass(1, context, num_blocks, config.vocab_size) for context in contexts}
    times: dict[int, list[float]] = {context: [] for context in contexts}
    for turn in range(repeats + 1):
        for context, batch in batches.items():
            seconds = time_pass(decoder, batch, cache)
            if turn:  # the first one warms up
                times[context].append(seconds)
    weights = decoder.weight_bytes if isinstance(decoder, NativeDecoder) else None
    kv_bytes = kv_bytes_per_token(config, decoder.dtype)
    report = []
    for context, measured in times.items():
        limit = (weights + context * kv_bytes) / bandwidth if weights and bandwidth else None
        entry: dict[str, Any] = {"context": context, "median_s": statistics.median(measured), "best_s": min(measured)}
        report.append(entry | {"limit_s": limit})
    return report


def show(report: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("contexts  plain decoding after so many tokens; the limit: reading weights, keys and values once")
    table = Table("tokens", "ms", "best", "limit ms", "tok/s", "limit tok/s", "of limit", box=box.SIMPLE)
    for entry in report:
        limit, median = entry["limit_s"], entry["median_s"]
        table.add_row(
            str(entry["context"]),
            f"{1e3 * median:.2f}",
            f"{1e3 * entry['best_s']:.2f}",
            f"{1e3 * limit:.2f}" if limit else "-",
            f"{1 / median:.0f}",
            f"{1 / limit:.0f}" if limit else "-",
            f"{100 * limit / median:.0f} %" if limit else "-",
        )
    console.print(table)
