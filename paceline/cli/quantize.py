"""`paceline quantize MODEL --method awq|gptq|fp8|int8 --out FOLDER`: a quantized folder, and a report on it."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.lab import format_table

if TYPE_CHECKING:
    from paceline.core.agreement import Passage
    from paceline.models.quantized.quantize import Report
    from paceline.models.quantized.recipe import Recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="alias, Hugging Face folder, .gguf file or hub id")
    parser.add_argument("--method", required=True, choices=["awq", "gptq", "fp8", "int8"])
    parser.add_argument("--out", required=True, metavar="FOLDER", type=Path)
    parser.add_argument("--bits", type=int, default=4, choices=[4, 8], help="gptq (default: %(default)s)")
    parser.add_argument("--group-size", type=int, metavar="N", help="awq, gptq (default: 128, 64 or 32: what divides)")
    parser.add_argument("--zero-points", action="store_true", help="gptq: ranges that need not lie around 0")
    parser.add_argument("--act-order", action="store_true", help="gptq: groups of inputs that are equally active")
    parser.add_argument("--damping", type=float, default=0.05, help="gptq (default: %(default)s)")
    parser.add_argument("--block", type=int, metavar="N", help="fp8: a scale per N x N weights (default: per output)")
    parser.add_argument(
        "--layout",
        default="own",
        choices=["own", "compressed-tensors"],
        help="awq, gptq: how the tensors lie (default: as the method's first tools have it)",
    )
    text = parser.add_argument_group("text")
    text.add_argument("--calibration", metavar="FILE", help="prompts (JSON) or plain text (default: prompts of ours)")
    text.add_argument(
        "--samples", type=int, default=64, help="passages for awq and gptq to learn from (default: %(default)s)"
    )
    text.add_argument("--held-out", metavar="FILE", help="likewise, to judge by (default: other prompts of ours)")
    text.add_argument("--held-out-samples", type=int, default=12, help="(default: %(default)s)")
    text.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: one per core")
    parser.add_argument("--json", action="store_true", help="the report as JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from paceline.models.loading import load_config
    from paceline.models.quantized.folder_writer import check_free
    from paceline.models.quantized.quantize import quantize_model
    from paceline.models.resolve import resolve_model

    begin_s = time.perf_counter()
    path = resolve_model(args.model)
    recipe = _recipe(args).checked(load_config(path))  # before the model answers anything
    check_free(args.out)
    calibration, held_out = _passages(args)
    report = quantize_model(path, args.out, recipe, calibration, held_out, _told)
    print(file=sys.stderr)
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        print(format_table(_rows(report)))
        print(
            f"{args.out} in {time.perf_counter() - begin_s:.0f} s; errors of all layers: quantization_report.json there"
        )
    return 0


def _recipe(args: argparse.Namespace) -> "Recipe":
    from paceline.models.quantized.recipe import Recipe

    return Recipe(
        args.method,
        args.bits,
        args.group_size,
        not args.zero_points,
        args.act_order,
        args.damping,
        args.block,
        args.layout,
        args.seed,
    )


def _passages(args: argparse.Namespace) -> "tuple[list[Passage], list[Passage]]":
    """To calibrate on, and held out; with the model's own answers, as it gives them now."""
    import torch

    from paceline.bench.run.passages import CALIBRATION, HELD_OUT, SAMPLED, passages
    from paceline.llm import LLM

    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    print("reading the model's own answers ...", file=sys.stderr, flush=True)
    llm = LLM(args.model, {"method": "none"}, device="cpu", num_threads=args.num_threads)
    held_out = passages(llm, args.held_out or HELD_OUT, args.held_out_samples, args.seed)
    if args.method in ("fp8", "int8") and args.calibration is None:
        return [], held_out  # they only round
    return passages(llm, args.calibration or CALIBRATION, args.samples, args.seed, SAMPLED), held_out


def _told(layer: int, total: int, error: float) -> None:
    print(f"\rlayer {layer + 1}/{total}: error {error:.4f} of its part", end="", file=sys.stderr, flush=True)


def _rows(report: "Report") -> list[dict[str, Any]]:
    recipe, agreement = report.recipe, report.agreement
    errors = report.layer_errors
    worst = max(range(len(errors)), key=errors.__getitem__)
    facts = {
        "method": recipe["method"],
        "group size": recipe["group_size"],
        "calibration tokens": report.calibration and report.calibration["tokens"],
        "mean error of a layer": f"{sum(errors) / len(errors):.4f}",
        "worst layer": f"{worst}: {errors[worst]:.4f}",
        "KL, nats per token": f"{agreement['kl']:.5f}",
        "same likeliest token": f"{agreement['same_top']:.2%}",
        "perplexity": f"{agreement['perplexity']:.3f} (before: {agreement['reference_perplexity']:.3f})",
        "MB": f"{report.bytes_stored / 1e6:.1f} (float16: {report.bytes_as_float16 / 1e6:.1f})",
    }
    if report.source_is_quantized:
        facts["note"] = "the source is quantized itself: all of this is on top of what that cost"
    return [{"figure": name, "value": value} for name, value in facts.items() if value is not None]
