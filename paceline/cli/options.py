"""Options that several verbs share: which model, how it drafts, how it samples."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.core.outputs import RequestMetrics
    from paceline.core.sampling_params import SamplingParams
    from paceline.llm import LLM

DEFAULT_MODEL = "smollm2-135m"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", default=DEFAULT_MODEL, help="alias, Hugging Face folder, .gguf file or hub id (default: %(default)s)"
    )
    group.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16", "half", "float"])
    group.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    group.add_argument(
        "--quantization",
        default="auto",
        choices=["auto", "none", "int8", "gguf", "checkpoint"],
        help="auto computes on the blocks of a GGUF file or a quantized folder where it can (default: %(default)s)",
    )
    group.add_argument("--kernels", default="auto", choices=["auto", "native", "torch"], help="on a CPU")
    group.add_argument(
        "--kv-cache-dtype",
        default="auto",
        choices=["auto", "float16", "int16", "int8"],
        help="of keys and values, on the native CPU kernels; int16: as near as float16, and attention multiplies "
        "integers; int8: half the memory (default: %(default)s: int16 beside quantized weights on AVX-512 VNNI)",
    )
    group.add_argument(
        "--batch-invariant",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="kernels that give a request the same bits in any batch (default: where they are fast: the native CPU "
        "kernels, always, and Triton on CUDA; --no-batch-invariant runs PyTorch's own kernels on CUDA)",
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="default: one per core")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt and answer together")


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation (changes the speed, never the output)")
    group.add_argument("--speculative-config", metavar="JSON", help='such as \'{"method": "ngram"}\'')
    group.add_argument("--spec-method", metavar="NAME", help="shorthand for its key method")
    group.add_argument("--spec-model", metavar="MODEL", help="shorthand for its key model")
    group.add_argument("--spec-tokens", type=int, metavar="K", help="shorthand for its key num_speculative_tokens")


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int = 256) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0: all tokens")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--seed", type=int)
    group.add_argument("--max-tokens", type=int, default=max_tokens, help="(default: %(default)s)")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    group.add_argument("--ignore-eos", action="store_true")


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """The --speculative-config JSON, overlaid with the shorthands."""
    config: dict[str, Any] = {}
    if args.speculative_config:
        try:
            config = json.loads(args.speculative_config)
        except json.JSONDecodeError as error:
            raise InvalidOptionError(f"--speculative-config is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise InvalidOptionError('--speculative-config must be a JSON object such as {"method": "ngram"}')
    shorthands = {"method": args.spec_method, "model": args.spec_model, "num_speculative_tokens": args.spec_tokens}
    config.update({key: value for key, value in shorthands.items() if value is not None})
    return config or None


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("dtype", "device", "kernels", "kv_cache_dtype", "batch_invariant", "num_threads", "max_model_len")
    quantization = None if args.quantization == "none" else args.quantization
    return {name: getattr(args, name) for name in names} | {"quantization": quantization}


def make_llm(args: argparse.Namespace) -> "LLM":
    from paceline.llm import LLM

    llm = LLM(args.model, speculative_config(args), **model_options(args))
    if not getattr(args, "json", False):
        print(f"[{args.model}: {llm.engine.model.execution}]", file=sys.stderr)
    return llm


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    from paceline.core.sampling_params import SamplingParams

    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_tokens", "stop", "ignore_eos")
    return SamplingParams(**{name: getattr(args, name) for name in names})


def summary_line(metrics: "RequestMetrics") -> str:
    """What a person wants to know after an answer, in one line."""
    speed = f"{1 / metrics.tpot_s:.1f} tok/s" if metrics.tpot_s else "-"
    line = f"{metrics.num_output_tokens} tokens, {speed}"
    if metrics.ttft_s is not None:
        line += f", first after {metrics.ttft_s * 1000:.0f} ms"
    if metrics.num_drafts:
        line += (
            f", {metrics.mean_acceptance_length:.2f} tokens per pass"
            f" ({metrics.draft_acceptance_rate:.0%} of the drafts accepted)"
        )
    return line
