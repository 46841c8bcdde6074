"""One training from a corpus to a drafter's file, and SpecInfer's pool of several.

A folder holds everything: `plan.json` (what was asked for), `checkpoint.pt`, the drafter and `report.json`. Called
again with the same plan, a run that was interrupted goes on from its checkpoint and ends with the same drafter; with
another plan it is refused.

A pool (`train_pool`) is boost-tuned: each next draft model is trained on the answers that the ones before predict
least, so that together, merged into one tree, they cover more than copies of the best one would.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import InvalidOptionError
from paceline.models.drafters.store import save_drafter
from paceline.train.acceptance import count_accepted, greedy_drafts
from paceline.train.corpus import Batches, Corpus, draft_vocabulary
from paceline.train.methods import METHODS, build_recipe
from paceline.train.recipe import DraftVocabulary, Recipe
from paceline.train.target import DenseTarget
from paceline.train.trainer import Trainer, TrainSettings

OnStep = Callable[[int, dict[str, Any]], None]
OnEval = Callable[[dict[str, Any]], None]
ENOUGH_COVERAGE = 0.97  # of the answers' tokens, by the draft vocabulary that is chosen where none was given


@dataclass(frozen=True, slots=True)
class Plan:
    method: str
    steps: int
    batch_tokens: int = 8192
    learning_rate: float | None = None  # None: the method's own
    optimizer: str = "adamw"
    draft_vocab_size: int | None = None
    held_out_share: float = 0.1
    eval_every: int = 100
    patience: int = 5
    checkpoint_every_s: float = 60.0
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the method's settings

    def settings(self) -> TrainSettings:
        return TrainSettings(
            steps=self.steps,
            learning_rate=self.learning_rate or METHODS[self.method].learning_rate,
            optimizer=self.optimizer,
            eval_every=self.eval_every,
            patience=self.patience,
            checkpoint_every_s=self.checkpoint_every_s,
        )


@dataclass(frozen=True, slots=True)
class Trained:
    path: Path  # the drafter
    report: dict[str, Any]
    recipe: Recipe


def train_drafter(
    plan: Plan,
    target: DenseTarget,
    corpus: Corpus,
    folder: Path,
    *,
    name: str | None = None,
    on_step: OnStep = lambda step, entry: None,
    on_eval: OnEval = lambda entry: None,
) -> Trained:
    _claim(folder, plan)
    training, held_out = corpus.split(plan.held_out_share)
    ids, coverage = choose_vocabulary(plan, training, target.config.vocab_size)
    torch.manual_seed(plan.seed)
    recipe = build_recipe(plan.method, target, DraftVocabulary.of(target, ids), plan.options)
    trainer = Trainer(
        recipe,
        target,
        Batches(training, plan.batch_tokens, target.device, plan.seed),
        Batches(held_out, plan.batch_tokens, target.device),
        plan.settings(),
        folder / "checkpoint.pt",
        on_step,
        on_eval,
    )
    result = trainer.run()
    report = {
        "plan": asdict(plan),
        "answers": len(corpus),
        "training_tokens": len(training.tokens),
        "draft_vocabulary": {"size": len(ids), "coverage": round(coverage, 4)},
        "parameters": sum(p.numel() for p in recipe.network.parameters() if p.requires_grad),
        "steps": result.steps,
        "stopped_early": result.stopped_early,
        "seconds": round(result.history.seconds, 1),
        "held_out": {str(k): trainer.measure(k).to_dict() for k in (4, 7)},
        "curve": result.history.held_out,
        "loss": [[entry["step"], entry["loss"]] for entry in result.history.train],
    }
    path = folder / f"{name or plan.method}.safetensors"
    head = getattr(recipe.network, "lm_head", None)
    trains_head = head is not None and head.weight.requires_grad
    card = {key: report[key] for key in ("plan", "answers", "draft_vocabulary", "steps", "held_out")}
    save_drafter(path, plan.method, recipe.network, head_is_target=not trains_head, target=target.config, card=card)
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    return Trained(path, report, recipe)


def train_pool(
    plan: Plan,
    target: DenseTarget,
    corpus: Corpus,
    folder: Path,
    size: int,
    *,
    on_step: OnStep = lambda step, entry: None,
    on_eval: OnEval = lambda entry: None,
) -> list[Trained]:
    """`size` draft models; every next one learns from the half of the answers that the others predict least."""
    pool: list[Trained] = []
    best = np.zeros(len(corpus))  # accepted drafts per token, by the best drafter so far
    part = corpus
    for i in range(size):
        member = replace(plan, method="draft", seed=plan.seed + i)
        trained = train_drafter(
            member, target, part, folder / f"draft-{i + 1}", name="draft", on_step=on_step, on_eval=on_eval
        )
        pool.append(trained)
        best = np.maximum(best, mean_right_drafts(trained.recipe, target, corpus, plan.batch_tokens))
        part = corpus.select(np.sort(np.argsort(best, kind="stable")[: max(2, len(corpus) // 2)]))
    return pool


@torch.no_grad()
def mean_right_drafts(
    recipe: Recipe, target: DenseTarget, corpus: Corpus, batch_tokens: int, num_tokens: int = 4
) -> NDArray[np.float64]:
    """[answers]: how many of `num_tokens` drafts are right, on the average over an answer's positions"""
    batches = Batches(corpus, batch_tokens, target.device)
    mean = np.zeros(len(corpus))
    for rows, batch in batches.once_with_rows():
        drafts = greedy_drafts(recipe, batch, target.forward(batch.tokens, recipe.hidden_layers), num_tokens)
        inside = batch.is_answer()
        right = (count_accepted(batch, drafts) * inside).sum(-1) / inside.sum(-1).clamp(min=1)
        mean[rows] = right.double().cpu().numpy()
    return mean


def choose_vocabulary(plan: Plan, corpus: Corpus, vocab_size: int) -> tuple[torch.Tensor, float]:
    """The size asked for, else the smallest power of two that covers enough of the answers."""
    sizes: Sequence[int]
    if plan.draft_vocab_size is not None:
        if not 2 <= plan.draft_vocab_size <= vocab_size:
            raise InvalidOptionError(
                f"a draft vocabulary has 2 to {vocab_size} tokens, the target's; got {plan.draft_vocab_size}"
            )
        sizes = [plan.draft_vocab_size]
    else:
        sizes = [size for size in (2**i for i in range(8, 20)) if size < vocab_size] + [vocab_size]
    for size in sizes:
        ids, coverage = draft_vocabulary(corpus, size, vocab_size)
        if coverage >= ENOUGH_COVERAGE:
            break
    return ids, coverage


def _claim(folder: Path, plan: Plan) -> None:
    """The folder belongs to one plan."""
    folder.mkdir(parents=True, exist_ok=True)
    file, content = folder / "plan.json", json.dumps(asdict(plan), indent=1, sort_keys=True)
    if file.is_file() and file.read_text() != content:
        raise InvalidOptionError(
            f"{folder} belongs to another training (see plan.json there): give the same options to go on with it, or "
            "another --output to start anew"
        )
    file.write_text(content)
