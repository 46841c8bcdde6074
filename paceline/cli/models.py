"""`paceline models`: which models have a short name, and which of them are already on this machine."""

import argparse
import json
import sys
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from paceline.models.aliases import ALIASES, DEFAULT_MODEL, cache_dir

    models = [_describe(alias, is_default=name == DEFAULT_MODEL) for name, alias in ALIASES.items()]
    if args.json:
        print(json.dumps({"cache": str(cache_dir()), "models": models}))
    else:
        _print_table(models)
    return 0


def _describe(alias: Any, *, is_default: bool) -> dict[str, Any]:
    cached = alias.is_cached
    files = [path for path in alias.folder.iterdir() if path.is_file()] if cached else []
    return {
        "name": alias.name,
        "default": is_default,
        "description": alias.description,
        "cached": cached,
        "size_bytes": sum(path.stat().st_size for path in files) if cached else None,
        "download_bytes": alias.download_bytes,
        "path": str(alias.folder) if cached else None,
    }


def _print_table(models: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "what it is", "state", "size", "path", box=box.SIMPLE)
    for model in models:
        state = "cached" if model["cached"] else "fetched on first use"
        size = model["size_bytes"] if model["cached"] else model["download_bytes"]
        name = f"{model['name']} (default)" if model["default"] else model["name"]
        table.add_row(name, model["description"], state, f"{size / 1e6:.0f} MB", model["path"] or "-")
    # A pipe has no width; a path cut in two could not be copied.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
    console.print("Also accepted: a Hugging Face folder, a .gguf file, or a Hub id such as Qwen/Qwen3-0.6B.")
