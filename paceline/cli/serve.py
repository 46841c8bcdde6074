"""`paceline serve`: the OpenAI-compatible server.

paceline serve smollm2-135m --port 8000
paceline serve --config config.json       options from a file, such as the one that `paceline bench report` recommends
"""

import argparse
import dataclasses
import gc
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.cli.options import (
    add_model_arguments,
    add_speculation_arguments,
    model_options,
    speculative_config,
)

if TYPE_CHECKING:
    from paceline.llm import AsyncLLM
    from paceline.serve.config import ServerConfig

API_KEY_VARIABLE = "PACELINE_API_KEY"
ADMIN_KEY_VARIABLE = "PACELINE_ADMIN_KEY"
# How long the event loop may keep the interpreter from the engine's thread, which asks for it several times a step.
# Python's own 5 ms: while clients keep the loop busy, steps take 30 to 50 ms longer.
SWITCH_INTERVAL_S = 0.0005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="options by name, JSON or YAML; the command line wins")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (0.0.0.0: all of them)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+", action="extend", default=[], help="names for clients")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--log-prompts", action=argparse.BooleanOptionalAction, default=False, help="write prompt text to the log"
    )
    parser.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="refuse a request with a field that is not known, rather than name it in x-paceline-ignored-fields",
    )
    add_model_arguments(parser)
    add_speculation_arguments(parser)
    parser.add_argument(
        "--tool-call-parser",
        metavar="NAME",
        help="how the model writes calls: hermes, llama3_json, "
        "mistral or generic; left out: what its chat template shows",
    )
    _add_engine(parser.add_argument_group("engine"))
    _add_answers(parser.add_argument_group("answers"))
    _add_protection(parser.add_argument_group("protection"))
    from paceline.core.foreign_options import ENGINE, SERVE
    from paceline.engine.arg_utils import add_foreign_flags

    add_foreign_flags(parser, ENGINE | SERVE, shown=False)


def expand_arguments(arguments: Sequence[str]) -> list[str]:
    """With the options of `--config FILE` written out."""
    from paceline.cli.config_file import expand

    return expand(arguments, add_arguments)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-num-seqs", type=int, default=64, help="sequences that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="ROWS", help="of one pass")
    group.add_argument(
        "--max-token-delay",
        type=float,
        default=0.02,
        metavar="SECONDS",
        help="that one client's prompt or draft may add to a pass in which others wait for a token",
    )
    group.add_argument("--num-kv-blocks", "--num-gpu-blocks-override", type=int, metavar="BLOCKS")
    group.add_argument("--kv-cache-memory-bytes", type=int, metavar="BYTES", help="instead of --num-kv-blocks")
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="of one KV block (default: 16)")
    group.add_argument(
        "--prefix-caching",
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV blocks of prompts for those that begin alike",
    )
    group.add_argument(
        "--kv-offload",
        metavar="BYTES|DIR[:BYTES]",
        help="keep them also when the pool needs their blocks: in host memory (2GiB), or in a folder (/var/kv:20GiB)",
    )
    group.add_argument("--seed", type=int, help="of requests that bring none")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    from paceline.engine.arg_utils import json_value
    from paceline.serve.generate.reasoning import PARSERS

    group.add_argument(
        "--generation-config",
        default="auto",
        metavar="SOURCE",
        help="of sampling defaults: auto (the model's generation_config.json), vllm (none), or a folder",
    )
    group.add_argument("--override-generation-config", type=json_value, metavar="JSON", help="before that file")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja, or a file of it, instead of the model's own")
    group.add_argument(
        "--reasoning-parser", choices=tuple(PARSERS), help="give what a model thinks (<think>) as a field of its own"
    )


# --option -> (field of ServerConfig, its type, what it means); defaults are the field's own
LIMITS: dict[str, tuple[str, type, str]] = {
    "--max-connections": ("max_connections", int, "open at once"),
    "--max-connections-per-client": ("max_connections_per_client", int, "of one IP address"),
    "--max-rate-per-client": (
        "max_rate_per_client",
        float,
        "a second: connections, errors and requests that generate nothing; more wait",
    ),
    "--max-header-bytes": ("max_header_bytes", int, "of one request"),
    "--header-timeout": ("header_timeout_s", float, "for a request's headers, or a silent connection"),
    "--max-body-bytes": ("max_body_bytes", int, "of one request"),
    "--body-timeout": ("body_timeout_s", float, "for the whole body"),
    "--read-timeout": ("read_timeout_s", float, "after which a reader that takes nothing is cut off"),
    "--max-prompt-tokens": ("max_prompt_tokens", int, "left out: the context"),
    "--max-tokens-limit": ("max_tokens_limit", int, "the most max_tokens a request may ask for"),
    "--max-choices": ("max_choices", int, "prompts x n of one call"),
    "--max-stop-strings": ("max_stop_strings", int, "of one call"),
    "--max-bad-words": ("max_bad_words", int, "of one call"),
    "--max-logit-bias": ("max_logit_bias", int, "entries of one call"),
    "--max-logprob-entries": ("max_logprob_entries", int, "choices x tokens x top of one call"),
    "--max-draft-nodes": ("max_draft_nodes", int, "choices x draft nodes that one call may ask for"),
    "--max-stored-responses": ("max_stored_responses", int, "of one tenant, for previous_response_id"),
    "--max-stored-bytes": ("max_stored_bytes", int, "of one tenant's stored responses"),
    "--max-queue-len": ("max_queue_len", int, "sequences that may wait; past it: 429"),
    "--request-timeout": ("request_timeout_s", float, "for one call"),
    "--drain-timeout": ("drain_timeout_s", float, "for open streams at shutdown"),
}


def _add_protection(group: argparse._ArgumentGroup) -> None:
    from paceline.serve.config import ServerConfig

    key_help = f"may be repeated: each key is a tenant of its own; or set {API_KEY_VARIABLE} (several: commas)"
    group.add_argument("--api-key", nargs="+", action="extend", default=[], help=key_help)
    group.add_argument(
        "--admin-key", action="append", default=[], help=f"sees all tenants on the live page; or {ADMIN_KEY_VARIABLE}"
    )
    defaults = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    for option, (field, kind, meaning) in LIMITS.items():
        metavar = "SECONDS" if field.endswith("_s") else "N"
        group.add_argument(option, type=kind, default=defaults[field], metavar=metavar, help=meaning)
    group.add_argument("--cors-origin", action="append", default=[], help="may be repeated; off by default")
    group.add_argument("--allowed-origins", type=_origins, metavar="JSON", help="the same as a list")


def _origins(text: str) -> list[str]:
    origins = json.loads(text)
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise ValueError(text)
    return origins


def run(args: argparse.Namespace) -> int:
    from paceline.core.foreign_options import ENGINE, SERVE, take_foreign

    foreign = ENGINE | SERVE
    take_foreign("paceline serve", foreign, {name: getattr(args, name) for name in foreign})
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        print(
            "paceline serve needs FastAPI, uvicorn and prometheus_client: pip install 'paceline[serve]'",
            file=sys.stderr,
        )
        return 2
    from paceline.serve.generate.over_async_llm import OverAsyncLLM
    from paceline.serve.http.server import run_server

    config = server_config(args)
    backend = OverAsyncLLM(make_engine(args), chosen_per_request())
    return run_server(backend, config, args.host, args.port, args.log_level)


def server_config(args: argparse.Namespace) -> "ServerConfig":
    from paceline.serve.config import ServerConfig

    model = args.name or args.model
    return ServerConfig(
        model_names=tuple(args.served_model_name) or (model,),
        api_keys=_keys(args.api_key, API_KEY_VARIABLE),
        admin_keys=_keys(args.admin_key, ADMIN_KEY_VARIABLE),
        cors_origins=(*args.cors_origin, *(args.allowed_origins or ())),
        log_prompts=args.log_prompts,
        tool_call_parser=args.tool_call_parser,
        strict=args.strict,
        reasoning_parser=args.reasoning_parser,
        **{field: getattr(args, option[2:].replace("-", "_")) for option, (field, _, _) in LIMITS.items()},
    )


def make_engine(args: argparse.Namespace) -> "AsyncLLM":
    """Loaded, with its memory touched and its tables made."""
    from paceline.core.kv_tensor import populate
    from paceline.llm import AsyncLLM

    model = args.name or args.model
    llm = AsyncLLM(
        model,
        speculative_config(args),
        **model_options(args),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_kv_blocks=args.num_kv_blocks,
        kv_cache_memory_bytes=args.kv_cache_memory_bytes,
        block_size=args.block_size,
        generation_config=args.generation_config,
        override_generation_config=args.override_generation_config,
        chat_template=args.chat_template,
        enable_prefix_caching=args.prefix_caching,
        max_token_delay_s=args.max_token_delay,
        kv_offload=args.kv_offload,
        seed=args.seed,
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    populate(
        llm.engine.core.runner.kv_cache
    )  # not beside the first requests: what they cost is what `auto` learns from
    llm.get_tokenizer().control_tokens.make_ready()
    llm.prepare_structured_outputs()
    gc.collect()
    gc.freeze()  # the model and the tables stay as long as the process: no collection need look through them again
    return llm


def chosen_per_request() -> list[str]:
    """Drafting methods that one request may choose."""
    from paceline.spec.methods import PROPOSERS

    return [name for name, method in PROPOSERS.items() if method.per_request and name != "none"]


def _keys(given: list[str], variable: str) -> tuple[str, ...]:
    """From the command line and, so that they need not stand in a process list, from the environment."""
    return tuple(given) + tuple(key for key in os.environ.get(variable, "").split(",") if key)
