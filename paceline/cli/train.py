"""`paceline train METHOD --model M --data FILE`: a drafter for any Llama or Qwen model, in one command.

The target answers the prompts itself, with our engine; then a drafter learns to predict these answers. Everything lies
in the output folder, and the same command again goes on where an interrupted one stopped."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import options
from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from rich.progress import Progress

    from paceline.train.corpus import Corpus
    from paceline.train.run import Plan, Trained
    from paceline.train.target import DenseTarget

METHODS = ("eagle3", "eagle", "medusa", "dflash", "draft", "pool")
LEAST_PROMPTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--data", metavar="FILE", required=True, help="prompts: JSONL or a ShareGPT list")
    parser.add_argument("--output", metavar="FOLDER", type=Path, help="default: drafters/MODEL/METHOD")
    answers = parser.add_argument_group("answers")
    answers.add_argument("--prompts", type=int, help="use that many of the file (default: all)")
    answers.add_argument("--answer-tokens", type=int, default=256, help="(default: %(default)s)")
    answers.add_argument("--sampled-share", type=float, default=0.4, help="answered at temperature 1 instead of 0")
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=int, default=2000, help="(default: %(default)s)")
    training.add_argument("--batch-tokens", type=int, default=8192, help="(default: %(default)s)")
    training.add_argument("--learning-rate", type=float, help="default: the method's")
    training.add_argument("--optimizer", choices=("adamw", "muon"), default="muon")
    training.add_argument("--draft-vocab", type=int, metavar="SIZE", help="default: what covers 97 %% of the answers")
    training.add_argument("--held-out", type=float, default=0.05, metavar="SHARE", help="(default: %(default)s)")
    training.add_argument("--eval-every", type=int, default=200, metavar="STEPS", help="(default: %(default)s)")
    training.add_argument("--patience", type=int, default=5, help="evaluations without gain before stopping")
    training.add_argument("--checkpoint-every", type=float, default=60.0, metavar="SECONDS")
    training.add_argument("--pool-size", type=int, default=2, help="draft models of a pool (default: %(default)s)")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="settings of the method")
    options.add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress

    plan = _plan(args)
    name = Path(args.model).name
    folder = args.output or Path("drafters") / name / args.method
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        corpus = _corpus(args, folder, progress)
        target = _target(args)
        trained = _train(args, plan, target, corpus, folder, progress)
    for one in trained:
        _report(one)
    return 0


def _plan(args: argparse.Namespace) -> "Plan":
    from paceline.train.run import Plan

    for name in ("answer_tokens", "steps", "batch_tokens", "eval_every", "pool_size", "patience"):
        if getattr(args, name) < 1:
            raise InvalidOptionError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    settings: dict[str, Any] = {}
    for pair in args.set:
        key, _, value = pair.partition("=")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError as error:
            raise InvalidOptionError(f"--set takes KEY=JSON such as num_layers=2, got {pair!r}: {error}") from error
    return Plan(
        method="draft" if args.method == "pool" else args.method,
        steps=args.steps,
        batch_tokens=args.batch_tokens,
        learning_rate=args.learning_rate,
        optimizer=args.optimizer,
        draft_vocab_size=args.draft_vocab,
        held_out_share=args.held_out,
        eval_every=args.eval_every,
        patience=args.patience,
        checkpoint_every_s=args.checkpoint_every,
        seed=args.seed,
        options=settings,
    )


def _corpus(args: argparse.Namespace, folder: Path, progress: "Progress") -> "Corpus":
    """The target's answers, read back where they were written already."""
    from paceline.bench.workloads.loaders import load_file
    from paceline.train.corpus import Corpus

    file = folder / "corpus.safetensors"
    if file.is_file():
        return Corpus.load(file)
    prompts = load_file(Path(args.data))[: args.prompts]
    if len(prompts) < LEAST_PROMPTS:
        raise InvalidOptionError(
            f"{args.data} gives {len(prompts)} prompts; training needs at least {LEAST_PROMPTS}, and thousands to be "
            "any good"
        )
    corpus = _answer(args, [(prompt.text, prompt.chat) for prompt in prompts], progress)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    corpus.save(partial)
    partial.replace(file)  # a kill leaves no half of it
    return corpus


def _answer(args: argparse.Namespace, prompts: list[tuple[str, bool]], progress: "Progress") -> "Corpus":
    from paceline.core.sampling_params import SamplingParams
    from paceline.llm import LLM
    from paceline.train.corpus import Corpus

    llm = LLM(args.model, **options.model_options(args))
    tokenizer = llm.get_tokenizer()
    room = llm.engine.config.max_model_len - args.answer_tokens
    tokens = []
    for text, chat in prompts:
        ids = tokenizer.chat_token_ids([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        if 0 < len(ids) <= room:
            tokens.append(list(ids))
    if len(tokens) < LEAST_PROMPTS:
        raise InvalidOptionError(
            f"only {len(tokens)} prompts of {args.data} fit into the context of {room + args.answer_tokens} tokens "
            f"beside {args.answer_tokens} tokens of answer: lower --answer-tokens, or give shorter prompts"
        )
    # Every so many prompts one is sampled: spread evenly, whatever the file's order.
    share = args.sampled_share
    heat = [float(int((i + 1) * share) > int(i * share)) for i in range(len(tokens))]
    params = [
        SamplingParams(temperature=t, max_tokens=args.answer_tokens, seed=args.seed + i) for i, t in enumerate(heat)
    ]
    task = progress.add_task("the target answers", total=len(tokens))
    outputs = llm.generate(list(tokens), params, on_step=lambda done, _: progress.update(task, completed=done))
    written = [i for i, output in enumerate(outputs) if output.error is None and output.outputs[0].token_ids]
    return Corpus.build(
        [tokens[i] for i in written], [outputs[i].outputs[0].token_ids for i in written], [heat[i] for i in written]
    )


def _target(args: argparse.Namespace) -> "DenseTarget":
    from paceline.models.decoder import Decoder
    from paceline.models.loader import load_model
    from paceline.train.target import DenseTarget

    loaded = load_model(
        args.model,
        dtype=args.dtype,
        device=args.device,
        quantization=None,
        kernels="torch",
        num_threads=args.num_threads,
    )
    assert isinstance(loaded.decoder, Decoder)
    return DenseTarget(loaded.decoder)


def _train(
    args: argparse.Namespace, plan: "Plan", target: "DenseTarget", corpus: "Corpus", folder: Path, progress: "Progress"
) -> "list[Trained]":
    from paceline.train.run import train_drafter, train_pool

    task = progress.add_task(f"training {args.method}", total=plan.steps)

    def on_step(step: int, entry: dict[str, Any]) -> None:
        progress.update(task, completed=step)
        if "loss" in entry:
            progress.update(task, description=f"training {args.method}, loss {entry['loss']:.3f}")

    def on_eval(entry: dict[str, Any]) -> None:
        length, shares = entry["mean_acceptance_length"], entry["per_position"]
        progress.console.print(f"step {entry['step']}: {length:.2f} tokens per pass, accepted by position {shares}")

    if args.method == "pool":
        return train_pool(plan, target, corpus, folder, args.pool_size, on_step=on_step, on_eval=on_eval)
    return [train_drafter(plan, target, corpus, folder, on_step=on_step, on_eval=on_eval)]


def _report(trained: "Trained") -> None:
    report, folder = trained.report, trained.path.parent
    print(f"{trained.path}  ({trained.path.stat().st_size / 2**20:.1f} MiB)")
    ending = "stopped early" if report["stopped_early"] else "all of them"
    print(f"  {report['steps']} steps ({ending}), {report['seconds']:.0f} s")
    for k, figures in report["held_out"].items():
        shares = " ".join(f"{share:.2f}" for share in figures["per_position"])
        print(f"  chains of {k}: {figures['mean_acceptance_length']:.2f} tokens per pass; by position {shares}")
    print(f"  {_draw_curves(trained)}, figures in {folder / 'report.json'}")


def _draw_curves(trained: "Trained") -> str:
    """Where the pictures are, or why there are none: a drafter that is trained needs no picture."""
    from paceline.errors import MissingExtraError
    from paceline.lab.charts import LineChart, Series, check_matplotlib, save

    try:
        check_matplotlib()
    except MissingExtraError as error:
        return f"no curves ({error})"
    report, folder = trained.report, trained.path.parent
    curve = [(entry["step"], entry["mean_acceptance_length"]) for entry in report["curve"]]
    chart = LineChart(
        f"{trained.path.stem}: held-out acceptance",
        "step",
        "tokens per pass, greedy chain of 4",
        [Series("held out", [step for step, _ in curve], [length for _, length in curve])],
        level=1.0,
    )
    save(chart, folder / "acceptance.svg")
    loss = Series("training", [step for step, _ in report["loss"]], [value for _, value in report["loss"]])
    save(LineChart(f"{trained.path.stem}: loss", "step", "cross-entropy", [loss]), folder / "loss.svg")
    return f"curves in {folder / 'acceptance.svg'} and {folder / 'loss.svg'}"
