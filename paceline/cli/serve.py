"""`paceline serve`: the OpenAI-compatible server.

paceline serve smollm2-135m --port 8000
paceline serve --config config.json       options from a file, such as the one that `paceline bench report` recommends
"""

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from paceline.cli.options import (
    add_model_arguments,
    add_speculation_arguments,
    model_options,
    speculative_config,
)

API_KEY_VARIABLE = "PACELINE_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--config", metavar="FILE", help="options by name, JSON or YAML; the command line wins")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (0.0.0.0: all of them)")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", action="append", default=[], help="name for clients; may be repeated")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--log-prompts", action=argparse.BooleanOptionalAction, default=False, help="write prompt text to the log"
    )
    add_model_arguments(parser)
    add_speculation_arguments(parser)
    _add_engine(parser.add_argument_group("engine"))
    _add_protection(parser.add_argument_group("protection"))


def expand_arguments(arguments: Sequence[str]) -> list[str]:
    """With the options of `--config FILE` written out."""
    from paceline.cli.config_file import expand

    return expand(arguments, add_arguments)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-num-seqs", type=int, default=64, help="sequences that run at once")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="ROWS", help="of one pass")
    group.add_argument("--num-kv-blocks", type=int, metavar="BLOCKS")
    group.add_argument(
        "--prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the KV blocks of prompts for those that begin alike",
    )
    group.add_argument("--seed", type=int, help="of requests that bring none")


def _add_protection(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--api-key", action="append", default=[], help=f"may be repeated; or set {API_KEY_VARIABLE}")
    group.add_argument("--max-body-bytes", type=int, default=4 << 20)
    group.add_argument("--max-prompt-tokens", type=int)
    group.add_argument("--max-tokens-limit", type=int, help="the most max_tokens a request may ask for")
    group.add_argument("--max-choices", type=int, default=128, help="prompts x n of one call")
    group.add_argument("--max-queue-len", type=int, default=256, help="sequences that may wait; past it: 429")
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS")
    group.add_argument("--drain-timeout", type=float, default=30.0, metavar="SECONDS", help="for streams at shutdown")
    group.add_argument("--cors-origin", action="append", default=[], help="may be repeated; off by default")


def run(args: argparse.Namespace) -> int:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        print("paceline serve needs FastAPI and uvicorn: pip install 'paceline[serve]'", file=sys.stderr)
        return 2
    from paceline.llm import AsyncLLM
    from paceline.serve.config import ServerConfig
    from paceline.serve.engine_backend import EngineBackend
    from paceline.serve.server import run_server
    from paceline.spec.proposers import PROPOSERS

    model = args.name or args.model
    config = ServerConfig(
        model_names=tuple(args.served_model_name) or (model,),
        api_keys=_api_keys(args.api_key),
        max_body_bytes=args.max_body_bytes,
        max_prompt_tokens=args.max_prompt_tokens,
        max_tokens_limit=args.max_tokens_limit,
        max_choices=args.max_choices,
        max_queue_len=args.max_queue_len,
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        cors_origins=tuple(args.cors_origin),
        log_prompts=args.log_prompts,
    )
    llm = AsyncLLM(
        model,
        speculative_config(args),
        **model_options(args),
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_kv_blocks=args.num_kv_blocks,
        enable_prefix_caching=args.prefix_caching,
        seed=args.seed,
    )
    gc.collect()
    gc.freeze()  # the model and the tables stay as long as the process: no collection need look through them again
    methods = [name for name, method in PROPOSERS.items() if method.per_request and name != "none"]
    return run_server(EngineBackend(llm, methods), config, args.host, args.port, args.log_level)


def _api_keys(given: list[str]) -> tuple[str, ...]:
    """From the command line and, so that they need not stand in a process list, from the environment."""
    from_environment = os.environ.get(API_KEY_VARIABLE, "")
    return tuple(given) + tuple(key for key in from_environment.split(",") if key)
