"""How the shipped drafters were trained: the whole experiment, from prompts to files.

    prepare    pack the target's weights and the tokenized prompts into one folder (needs no accelerator)
    generate   the target writes its own answers to the prompts
    compare    short trainings of EAGLE-3 with other settings, to choose optimizer, rate and head
    train      one drafter, for so many seconds
    smoke      all of that on random weights for a few seconds: does it run here at all?

    python benchmarks/train_drafters.py prepare --out packed --gsm8k train.jsonl --sharegpt sharegpt.json
    python benchmarks/train_drafters.py generate --packed packed --state state
    python benchmarks/train_drafters.py train eagle3 --packed packed --state state --seconds 300
    python benchmarks/train_drafters.py train eagle3 ... --start-from eagle3.safetensors --set variation_weight=1

Prompts are GSM8K's training questions and the human turns of ShareGPT, some of them wrapped into a request to
summarize, translate or answer. The answers are the target's own. Every result is one JSON line, also kept in
STATE/results.jsonl.
"""

import argparse
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout that is not installed

from paceline.core.model_config import ModelConfig, RopeScaling
from paceline.models.decoder import Decoder
from paceline.models.drafters.store import load_drafter, save_drafter
from paceline.models.layout import expected_shapes
from paceline.train.acceptance import measure_acceptance
from paceline.train.corpus import Batches, Corpus, draft_vocabulary
from paceline.train.methods import METHODS, build_recipe
from paceline.train.recipe import DraftVocabulary
from paceline.train.sampler import AnswerJob, write_answers
from paceline.train.target import DenseTarget
from paceline.train.trainer import Trainer, TrainSettings

MAX_PROMPT_TOKENS = 448
LONG_PROMPT_TOKENS = 1000  # a share of the prompts may be that long
WRAPPERS = (
    "Summarize the following text in a few sentences.\n\n{}",
    "Give me a short summary of this:\n{}",
    "What are the key points of the text below?\n\n{}",
    "{}\n\nSummarize the above.",
    "Translate this into English: {}",
    "Translate the following sentence into German: {}",
    "Read the passage and answer: what is it about, and what matters most?\n\nPassage: {}",
    "Use the following information to write a helpful answer.\n\n{}\n\nAnswer:",
)
HELD_OUT_SHARE = 0.02
HELD_OUT_ANSWERS = 300  # of each temperature, for the acceptance length
ANSWER_TOKENS = 192
BLOCK = 32  # weights per block in both quantized formats
CONFIG_FILE, PROMPTS_FILE = "config.json", "prompts.npz"
VOCABULARY_SIZES = (8192, 10240, 12288, 16384)  # the smallest that covers enough, else the last
ENOUGH_COVERAGE = 0.97


def main() -> None:
    args = parse()
    torch.set_float32_matmul_precision("high")
    args.run(args)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    prepare = verbs.add_parser("prepare")
    prepare.add_argument("--model", default="smollm2-135m")
    prepare.add_argument("--gsm8k", type=Path, required=True)
    prepare.add_argument("--sharegpt", type=Path, required=True)
    prepare.add_argument(
        "--exclude", type=Path, nargs="*", default=[], help="benchmark files whose prompts must not occur"
    )
    prepare.add_argument("--out", type=Path, required=True)
    prepare.add_argument("--part-mb", type=int, default=48)
    prepare.set_defaults(run=run_prepare)
    for name, run in (("generate", run_generate), ("compare", run_compare), ("train", run_train), ("smoke", run_smoke)):
        verb = verbs.add_parser(name)
        if name == "train":
            verb.add_argument("method", choices=METHODS)
            verb.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="settings of the method")
            verb.add_argument("--start-from", type=Path, help="a drafter of the same shape to go on from")
            verb.add_argument("--steps", type=int, help="instead of --seconds")
            verb.add_argument("--name", help="of the file, where it is not the method's")
        verb.add_argument("--packed", type=Path, help="folder made by prepare")
        verb.add_argument("--state", type=Path, required=True, help="corpus, checkpoints, drafters and results")
        verb.add_argument("--seconds", type=float, default=60.0)
        verb.add_argument("--batch-tokens", type=int, default=24_576)
        verb.add_argument("--vocabulary", type=int, help="size of the draft vocabulary; default: by coverage")
        verb.add_argument("--learning-rate", type=float)
        verb.add_argument("--optimizer", choices=("adamw", "muon"))
        verb.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        verb.add_argument("--max-answers", type=int, default=1_000_000)
        verb.set_defaults(run=run)
    return parser.parse_args()


# ---- prepare


def run_prepare(args: argparse.Namespace) -> None:
    from paceline.models.gguf_file import GgufFile
    from paceline.models.resolve import resolve_model
    from paceline.models.tokenizer import Tokenizer

    args.out.mkdir(parents=True, exist_ok=True)
    folder = resolve_model(args.model)
    file = GgufFile(folder / "source.gguf")
    (args.out / CONFIG_FILE).write_text(json.dumps(asdict(file.config())))
    pack_weights(file.weights(keep_quantized=True), args.out, args.part_mb * 10**6)
    tokenizer = Tokenizer.from_folder(folder)
    excluded = [text for path in args.exclude for text in benchmark_texts(path)]
    prompts = collect_prompts(args.gsm8k, args.sharegpt, excluded)
    sources = sorted({source for source, _ in prompts})
    token_ids, kinds = [], []
    for source, text in prompts:
        ids = tokenizer.chat_token_ids([{"role": "user", "content": text}])
        if len(ids) <= (LONG_PROMPT_TOKENS if source in ("long", "wrapped") else MAX_PROMPT_TOKENS):
            token_ids.append(ids)
            kinds.append(sources.index(source))
    np.savez_compressed(
        args.out / PROMPTS_FILE,
        tokens=np.concatenate([np.asarray(ids, dtype=np.uint16) for ids in token_ids]),
        lengths=np.asarray([len(ids) for ids in token_ids], dtype=np.uint16),
        kinds=np.asarray(kinds, dtype=np.uint8),
        sources=np.asarray(sources),
    )
    counts = {source: kinds.count(i) for i, source in enumerate(sources)}
    print(f"{len(token_ids)} prompts, {sum(map(len, token_ids))} tokens: {counts}")
    for path in sorted(args.out.iterdir()):
        print(f"{path.name:20} {path.stat().st_size / 1e6:8.2f} MB")


def pack_weights(weights: Any, out: Path, part_bytes: int) -> None:
    """Raw blocks in numbered .npz parts of limited size; the key says how to read them: name|kind|rows|columns."""
    part: dict[str, Any] = {}
    size, index = 0, 1
    for name, tensor in weights.items():
        kind = getattr(tensor, "kind", "F32")
        data = (tensor.data if kind != "F32" else tensor).numpy()
        if size + data.nbytes > part_bytes and part:
            np.savez(out / f"target{index}.npz", **part)
            part, size, index = {}, 0, index + 1
        shape = tensor.shape if len(tensor.shape) == 2 else (1, tensor.shape[0])
        part[f"{name}|{kind}|{shape[0]}|{shape[1]}"] = data
        size += data.nbytes
    np.savez(out / f"target{index}.npz", **part)


def benchmark_texts(path: Path) -> list[str]:
    texts: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        texts += row.get("turns") or [row["prompt"]]
    return texts


def collect_prompts(gsm8k: Path, sharegpt: Path, excluded: Sequence[str]) -> list[tuple[str, str]]:
    """(source, text), in a fixed random order"""
    rng = random.Random(0)
    questions = [json.loads(line)["question"] for line in gsm8k.read_text(encoding="utf-8").splitlines()]
    turns = list(dict.fromkeys(text.strip() for text in sharegpt_turns(sharegpt)))
    forbidden = {normal(text) for text in excluded}
    turns = [turn for turn in turns if len(turn) >= 8 and normal(turn) not in forbidden]
    short = [turn for turn in turns if len(turn) <= 1600]
    long = [turn for turn in turns if 1600 < len(turn) <= 4500]
    suited = [turn for turn in turns if 120 <= len(turn) <= 3500]
    to_wrap = rng.sample(suited, min(6000, len(suited)))
    wrapped = [rng.choice(WRAPPERS).format(turn) for turn in to_wrap]
    prompts = [("gsm8k", text) for text in questions] + [("sharegpt", text) for text in short]
    prompts += [("long", text) for text in long] + [("wrapped", text) for text in wrapped]
    rng.shuffle(prompts)
    return prompts


def normal(text: str) -> str:
    return " ".join(text.lower().split())


def sharegpt_turns(path: Path) -> Iterator[str]:
    """Human turns; the file may be cut off in the middle."""
    content = path.read_text(encoding="utf-8", errors="replace")
    decoder = json.JSONDecoder()
    position = content.index("[") + 1
    while True:
        while position < len(content) and content[position] in " \n\r\t,":
            position += 1
        try:
            conversation, position = decoder.raw_decode(content, position)
        except json.JSONDecodeError:
            return
        for turn in conversation.get("conversations", []):
            if turn.get("from") == "human" and isinstance(turn.get("value"), str):
                yield turn["value"]


# ---- the target


def load_target(packed: Path, device: str) -> DenseTarget:
    config_dict = json.loads((packed / CONFIG_FILE).read_text())
    scaling = RopeScaling(**config_dict.pop("rope_scaling"))
    fixed = {name: tuple(value) if isinstance(value, list) else value for name, value in config_dict.items()}
    weights: dict[str, Tensor] = {}
    for part in sorted(packed.glob("target*.npz")):
        with np.load(part) as arrays:
            for key in arrays.files:
                name, kind, rows, columns = key.split("|")
                weights[name] = widen(arrays[key], kind, int(rows), int(columns))
    return make_target(ModelConfig(**fixed, rope_scaling=scaling), weights, device)


def make_target(config: ModelConfig, weights: dict[str, Tensor], device: str) -> DenseTarget:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return DenseTarget(Decoder(config, weights, dtype=dtype, device=device))


def widen(data: Any, kind: str, rows: int, columns: int) -> Tensor:
    """The numbers that a GGUF tensor means: [rows, columns], or [columns] for a plain vector"""
    if kind == "F32":
        return torch.from_numpy(data)
    blocks = data.reshape(rows * columns // BLOCK, -1)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)  # [blocks, 1]
    if kind == "Q8_0":
        return torch.from_numpy(blocks[:, 2:].view(np.int8) * scale).view(rows, columns)
    assert kind == "Q4_1", kind
    low = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)  # low halves come first
    return torch.from_numpy(nibbles * scale + low).view(rows, columns)


# ---- generate


def run_generate(args: argparse.Namespace) -> None:
    args.state.mkdir(parents=True, exist_ok=True)
    target = load_target(args.packed, args.device)
    with np.load(args.packed / PROMPTS_FILE) as arrays:
        ends = np.cumsum(arrays["lengths"].astype(np.int64))
        prompts = [part.tolist() for part in np.split(arrays["tokens"].astype(np.int32), ends[:-1])]
    generate_corpus(target, prompts[: args.max_answers], args)


def generate_corpus(target: DenseTarget, prompts: Sequence[list[int]], args: argparse.Namespace) -> Corpus:
    """Every prompt is answered greedily and at temperature 1, one of four also at 0.7."""
    answer_tokens = ANSWER_TOKENS if args.device == "cuda" else 16
    jobs = [AnswerJob(prompt, temperature, answer_tokens) for prompt in prompts for temperature in (0.0, 1.0)]
    jobs += [AnswerJob(prompt, 0.7, answer_tokens) for prompt in prompts[::4]]
    begin_s = time.perf_counter()

    def progress(finished: int) -> None:
        print(f"{finished}/{len(jobs)} answers after {time.perf_counter() - begin_s:.0f} s", flush=True)

    answers = write_answers(
        target,
        jobs,
        cache_tokens=2_400_000,
        max_batch=4096,
        deadline_s=begin_s + args.seconds,
        on_progress=progress,
    )
    done = [i for i, answer in enumerate(answers) if answer]
    corpus = Corpus.build(
        [jobs[i].prompt for i in done], [answers[i] for i in done], [jobs[i].temperature for i in done]
    )
    corpus.save(args.state / "corpus.safetensors")
    vocabularies = {size: draft_vocabulary(corpus, size, target.config.vocab_size)[0] for size in VOCABULARY_SIZES}
    result = {
        "answers": {str(t): int((corpus.temperatures == np.float32(t)).sum()) for t in (0.0, 0.7, 1.0)},
        "asked": len(jobs),
        "answer_tokens": corpus.num_answer_tokens,
        "tokens": len(corpus.tokens),
        "seconds": round(time.perf_counter() - begin_s, 1),
        "vocabulary_coverage": {size: covered(corpus, ids) for size, ids in vocabularies.items()},
    }
    record(args, "generate", result)
    return corpus


def covered(corpus: Corpus, ids: Tensor) -> dict[str, float]:
    """By temperature, the share of the answers' tokens that are among `ids`"""
    shares = {}
    for temperature in (0.0, 0.7, 1.0):
        chosen = np.flatnonzero(corpus.temperatures == np.float32(temperature))
        if len(chosen):
            shares[str(temperature)] = round(
                float(np.isin(corpus.select(chosen).answer_tokens(), ids.numpy()).mean()), 4
            )
    return shares


# ---- train


def run_train(args: argparse.Namespace) -> None:
    target = load_target(args.packed, args.device)
    corpus = Corpus.load(args.state / "corpus.safetensors")
    options = {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in args.set)}
    chosen = args.state / "chosen.json"
    defaults = json.loads(chosen.read_text()) if chosen.is_file() else {}
    head = defaults.pop("train_head", None)
    if head is not None:  # what a trained head takes of the storage, the draft model gives
        options |= {"train_head": head} if args.method == "eagle3" else {}
        options = ({"num_layers": 2 if head else 3} if args.method == "draft" else {}) | options
    train(args, target, corpus, args.method, options, defaults, save=True)


def train(
    args: argparse.Namespace,
    target: DenseTarget,
    corpus: Corpus,
    method: str,
    options: dict[str, Any],
    defaults: dict[str, Any],
    save: bool,
) -> dict[str, Any]:
    training, held_out = corpus.split(HELD_OUT_SHARE)
    batches = Batches(training, args.batch_tokens, target.device)
    checks, drawn = (
        Batches(held_out.select(np.flatnonzero(held_out.temperatures == t)[:HELD_OUT_ANSWERS]), 24_576, target.device)
        for t in (0.0, 1.0)
    )
    ids, coverage = choose_vocabulary(args, training, target)
    vocabulary = DraftVocabulary.of(target, ids)
    settings = TrainSettings(
        steps=1,
        learning_rate=args.learning_rate or defaults.get("learning_rate") or METHODS[method].learning_rate,
        optimizer=args.optimizer or defaults.get("optimizer") or "adamw",
        patience=10**9,
    )
    steps = args.steps
    if steps is None:
        step_s = time_steps(build_recipe(method, target, vocabulary, options), target, batches, checks, settings)
        steps = max(10, int(args.seconds / step_s))
    settings = replace(settings, steps=steps, eval_every=max(5, steps // 4))
    torch.manual_seed(0)
    recipe = build_recipe(method, target, vocabulary, options)
    if args.start_from:
        start_from(recipe, args.start_from, target)
    print(f"{method}: {steps} steps, epoch {batches.steps_per_epoch} steps", flush=True)
    trainer = Trainer(
        recipe,
        target,
        batches,
        checks,
        settings,
        on_step=print_step,
        on_eval=lambda e: print(json.dumps(e | {"coupled": measure_coupled(trainer, drawn)}), flush=True),
    )
    result = trainer.run()
    card = {
        "method": method,
        "options": options,
        "settings": asdict(settings),
        "batch_tokens": args.batch_tokens,
        "draft_vocabulary": [len(ids), round(coverage, 4)],
        "parameters": sum(p.numel() for p in recipe.network.parameters() if p.requires_grad),
        "start_from": args.start_from and args.start_from.name,
        "seconds": round(result.history.seconds, 1),
        "epochs": round(steps / batches.steps_per_epoch, 2),
        "training_tokens": len(training.tokens),
        "held_out": {k: trainer.measure(k).to_dict() for k in (4, 7)} if save else result.history.held_out[-1],
        "held_out_coupled": {k: measure_coupled(trainer, drawn, k) for k in (4, 7)},
        "curve": [(e["step"], e["mean_acceptance_length"]) for e in result.history.held_out],
        "loss": [(e["step"], round(e["loss"], 4)) for e in result.history.train[:: max(1, steps // 200)]],
    }
    if save:
        trained_head = method == "eagle3" and recipe.network.lm_head.weight.requires_grad  # type: ignore[union-attr]
        path = args.state / "drafters" / f"{args.name or method}.safetensors"
        save_drafter(path, method, recipe.network, head_is_target=not trained_head, target=target.config, card=card)
        print(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB", flush=True)
    record(args, "train" if save else "compare", card)
    return card


def start_from(recipe: Any, path: Path, target: DenseTarget) -> None:
    """The weights of a finished drafter; its draft vocabulary may be another one."""
    state = load_drafter(path, target.config, lambda ids: target.head[ids.to(target.device)]).state_dict()
    own = recipe.network.state_dict()
    with torch.no_grad():
        for name, tensor in state.items():
            if "head" not in name:  # the head is the target's, frozen
                own[name].copy_(tensor)
    if hasattr(recipe, "scale"):
        recipe.scale.starts_folded = True


def measure_coupled(trainer: Trainer, drawn: Batches, num_tokens: int = 4) -> dict[str, Any]:
    """Chains of coupled drafts on held-out answers at temperature 1"""
    recipe, target = trainer.recipe, trainer.target
    with torch.autocast(target.device.type, torch.bfloat16, enabled=target.device.type == "cuda"):
        return measure_acceptance(recipe, target, drawn.once(), num_tokens, coupled=True).to_dict()


def choose_vocabulary(args: argparse.Namespace, corpus: Corpus, target: DenseTarget) -> tuple[Tensor, float]:
    for size in [args.vocabulary] if args.vocabulary else VOCABULARY_SIZES:
        ids, coverage = draft_vocabulary(corpus, size, target.config.vocab_size)
        if coverage >= ENOUGH_COVERAGE:
            break
    return ids, coverage


def time_steps(recipe: Any, target: DenseTarget, batches: Batches, checks: Batches, settings: TrainSettings) -> float:
    """Seconds of one step, the median over a few, on a network that is thrown away."""
    times: list[float] = []

    def on_step(step: int, entry: dict[str, Any]) -> None:
        if target.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    few = replace(settings, steps=24 if target.device.type == "cuda" else 4, eval_every=10**9)
    trainer = Trainer(recipe, target, batches, checks, few, on_step=on_step)
    trainer.held_out = Batches(checks.corpus.select([0]), checks.batch_tokens, target.device)
    trainer.run()
    return float(np.mean(np.diff(times)[len(times) // 3 :]))


def print_step(step: int, entry: dict[str, Any]) -> None:
    if "loss" in entry and (step % 100 == 0 or step <= 50):
        print(
            f"step {step}: loss {entry['loss']:.4f} agreement {entry['agreement']} |g| {entry['grad_norm']:.2f}",
            flush=True,
        )


def run_compare(args: argparse.Namespace) -> None:
    """Short EAGLE-3 trainings; the best optimizer and rate are written down for `train` to use."""
    args.steps, args.start_from, args.name = None, None, None
    target = load_target(args.packed, args.device)
    corpus = Corpus.load(args.state / "corpus.safetensors")
    variants = [
        {"optimizer": "adamw", "learning_rate": 1e-3, "train_head": True},
        {"optimizer": "muon", "learning_rate": 1e-3, "train_head": True},
        {"optimizer": "muon", "learning_rate": 2e-3, "train_head": True},
    ]
    scores = [compare(args, target, corpus, variant) for variant in variants]
    best = variants[int(np.argmax(scores))]
    frozen = compare(args, target, corpus, best | {"train_head": False})
    # A frozen head costs no storage: train it only where that clearly pays.
    chosen = best | {"train_head": max(scores) > 1.02 * frozen}
    (args.state / "chosen.json").write_text(json.dumps(chosen))
    record(args, "chosen", chosen | {"scores": scores, "frozen_head": frozen})


def compare(args: argparse.Namespace, target: DenseTarget, corpus: Corpus, variant: dict[str, Any]) -> float:
    options = {"train_head": variant["train_head"]}
    card = train(args, target, corpus, "eagle3", options, variant, save=False)
    return float(card["held_out"]["mean_acceptance_length"])


# ---- smoke


def run_smoke(args: argparse.Namespace) -> None:
    """Random weights of the real shape (a tiny shape on a CPU), a few answers, a few steps of everything."""
    args.state.mkdir(parents=True, exist_ok=True)
    big = args.device == "cuda"
    config = ModelConfig(
        family="llama",
        vocab_size=49152 if big else 512,
        hidden_size=576 if big else 64,
        intermediate_size=1536 if big else 96,
        num_layers=30 if big else 6,
        num_heads=9 if big else 6,
        num_kv_heads=3 if big else 2,
        head_dim=64 if big else 16,
        max_position=2048,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        tie_word_embeddings=True,
        eos_token_ids=(2,),
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in expected_shapes(config).items()
    }
    target = make_target(config, weights, args.device)
    rng = random.Random(0)
    count = 6000 if big else 60
    prompts = [
        [rng.randrange(config.vocab_size) for _ in range(rng.randint(20, 400 if big else 40))] for _ in range(count)
    ]
    corpus = generate_corpus(target, prompts, args)
    args.vocabulary = 8192 if big else 256
    args.steps, args.start_from, args.name = None, None, None
    for method, optimizer in (*((method, "adamw") for method in METHODS), ("eagle3", "muon")):
        train(args, target, corpus, method, {}, {"optimizer": optimizer}, save=True)


def record(args: argparse.Namespace, what: str, result: dict[str, Any]) -> None:
    line = {
        "what": what,
        **result,
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "commit": commit(),
    }
    with (args.state / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line), flush=True)


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
