"""`EngineArgs`: the options of an engine as one object, and as flags of a command line, as in vLLM.

>>> args = EngineArgs(model="smollm2-135m", max_num_seqs=8, enforce_eager=True)
>>> args.given()["max_num_seqs"]
8

A field is an option of `LLM` (`OWN`), or one of vLLM's that has no effect (core/foreign_options.py). None: not given.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from paceline.core.foreign_options import ENGINE, Foreign

DEFAULTS = {"model": "smollm2-135m", "quantization": "auto"}  # of the others: None, not given


def json_value(text: str) -> Any:
    """A value as JSON would have it, else as text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


# Options of `LLM`: how a word of the command line becomes a value. bool: a switch with a `--no-` twin.
OWN: dict[str, Any] = {
    "model": str,
    "speculative_config": json_value,
    "dtype": str,
    "device": str,
    "quantization": str,
    "batch_invariant": bool,
    "kernels": str,
    "kv_cache_dtype": str,
    "num_threads": int,
    "max_model_len": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "block_size": int,
    "num_kv_blocks": int,
    "kv_cache_memory_bytes": int,
    "enable_prefix_caching": bool,
    "max_token_delay_s": float,
    "kv_offload": str,
    "seed": int,
    "generation_config": str,
    "override_generation_config": json_value,
    "chat_template": str,
    "tokenizer": str,
    "profiler_config": json_value,
    "num_gpu_blocks_override": int,
    "spec_method": str,
    "spec_model": str,
    "spec_tokens": int,
}
SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "data_parallel_size": "-dp"}
SWITCHES = ("enable_", "disable_", "enforce_", "trust_", "use_", "skip_", "calculate_", "async_", "return_", "allow_")


class _EngineArgs:
    """What the fields below are used for."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        group = parser.add_argument_group("engine")
        for name, kind in OWN.items():
            add_flag(group, name, kind, default=DEFAULTS.get(name))
        add_foreign_flags(parser, ENGINE)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        names = [one.name for one in dataclasses.fields(EngineArgs)]
        return EngineArgs(**{name: value for name, value in vars(args).items() if name in names})

    def given(self) -> dict[str, Any]:
        """What was said, for `LLM(**args.given())`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def add_foreign_flags(
    parser: argparse.ArgumentParser,
    table: Mapping[str, Foreign],
    shown: bool = True,  # in --help
) -> None:
    """vLLM's flags that have no effect; `take_foreign` says so, or why a value is refused."""
    group = parser.add_argument_group("accepted without effect, or refused with the reason")
    for name, foreign in table.items():
        kind = bool if name.startswith(SWITCHES) else json_value
        add_flag(group, name, kind, help=foreign.reason if shown else argparse.SUPPRESS)


def add_flag(group: argparse._ArgumentGroup, name: str, kind: Any, **options: Any) -> None:
    flags = [f"--{name.replace('_', '-')}", *([SHORT[name]] if name in SHORT else [])]
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **{"default": None, **options})
    else:
        group.add_argument(*flags, type=kind, **{"default": None, **options})


EngineArgs: Any = dataclasses.make_dataclass(
    "EngineArgs",
    [
        (name, Any, dataclasses.field(default=DEFAULTS.get(name)))
        for name in (*OWN, *ENGINE)  # model is the first
    ],
    bases=(_EngineArgs,),
    namespace={"__doc__": __doc__, "__module__": __name__},
)
AsyncEngineArgs = EngineArgs
