"""The training loop, the same for every method: AdamW or Muon, warmup and cosine, checkpoints, early stop.

Everything random is a function of (seed, step), and a checkpoint holds everything else, so a run that was killed
goes on as if nothing had happened. Early stop looks at what matters, the acceptance length on held-out prompts, not at
the loss.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidOptionError
from paceline.train.acceptance import Acceptance, measure_acceptance
from paceline.train.corpus import Batches
from paceline.train.recipe import Recipe
from paceline.train.target import DenseTarget

# A vocabulary matrix starts as the target's own, which is nearly right, and each of its rows sees few examples.
VOCABULARY_RATE = 0.3


@dataclass(frozen=True, slots=True)
class TrainSettings:
    steps: int
    learning_rate: float = 1e-3
    optimizer: str = "adamw"  # or "muon": orthogonalised updates for the matrices, AdamW for the rest
    warmup_share: float = 0.03
    final_lr_share: float = 0.02
    weight_decay: float = 0.01
    clip: float = 0.5  # of the gradient's norm
    eval_every: int = 200
    eval_tokens: int = 4  # drafts per chain in evaluations
    patience: int = 5  # evaluations without a better acceptance length before stopping
    checkpoint_every_s: float = 60.0


@dataclass(slots=True)
class History:
    """Curves. `step` counts finished steps."""

    train: list[dict[str, Any]] = field(default_factory=list)  # step, loss, agreement per draft position, lr
    held_out: list[dict[str, Any]] = field(default_factory=list)  # step, and Acceptance.to_dict()
    seconds: float = 0.0  # over all sessions of the run

    @property
    def best(self) -> dict[str, Any] | None:
        return max(self.held_out, key=lambda e: float(e["mean_acceptance_length"]), default=None)


@dataclass(slots=True)
class TrainResult:
    history: History
    steps: int  # finished
    stopped_early: bool


class Trainer:
    def __init__(
        self,
        recipe: Recipe,
        target: DenseTarget,
        batches: Batches,
        held_out: Batches,
        settings: TrainSettings,
        checkpoint: Path | None = None,
        on_step: Callable[[int, dict[str, Any]], None] = lambda step, entry: None,
        on_eval: Callable[[dict[str, Any]], None] = lambda entry: None,
    ) -> None:
        self.recipe, self.target, self.batches, self.held_out = recipe, target, batches, held_out
        self.settings, self.checkpoint = settings, checkpoint
        self.on_step, self.on_eval = on_step, on_eval
        self.history = History()
        self.parameters = [p for p in recipe.network.parameters() if p.requires_grad]
        self.optimizers = make_optimizers(recipe.network, settings)
        self._best_state: dict[str, Tensor] = {}
        self._step = 0

    def run(self) -> TrainResult:
        """Train to the end (or on from the checkpoint); the network then holds its best weights."""
        self.recipe.calibrate(self.batches.at(0))
        self._resume()
        begin_s, saved_s, before_s = time.perf_counter(), time.perf_counter(), self.history.seconds
        stopped = False
        while self._step < self.settings.steps and not stopped:
            entry = self._train_step()
            self.on_step(self._step, entry)
            if self._step % self.settings.eval_every == 0 or self._step == self.settings.steps:
                stopped = self._evaluate()
            self.history.seconds = before_s + time.perf_counter() - begin_s
            if time.perf_counter() - saved_s > self.settings.checkpoint_every_s or stopped:
                self._save()
                saved_s = time.perf_counter()
        self._save()
        if self._best_state:
            self.recipe.network.load_state_dict(self._best_state)
        self.recipe.finish()
        return TrainResult(self.history, self._step, stopped)

    def _train_step(self) -> dict[str, Any]:
        rate = learning_rate(self._step, self.settings)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("share", 1.0)
        batch = self.batches.at(self._step)
        target = self.target.forward(batch.tokens, self.recipe.hidden_layers)
        with self._autocast():
            output = self.recipe.loss(batch, target, self._step)
        output.loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._step += 1
        # Reading the loss waits for the device: only now and then.
        entry: dict[str, Any] = {"step": self._step}
        if self._step % 10 == 0 or self._step == 1:
            entry |= {"loss": float(output.loss.detach()), "lr": rate, "grad_norm": float(norm)}
            entry["agreement"] = [round(float(a), 4) for a in output.agreement]
            self.history.train.append(entry)
            if not math.isfinite(entry["loss"]):
                raise InvalidOptionError(
                    f"the loss is {entry['loss']} after {self._step} steps: lower learning_rate (now "
                    f"{self.settings.learning_rate})"
                )
        return entry

    def measure(self, num_tokens: int) -> Acceptance:
        self.recipe.network.eval()
        with self._autocast():
            acceptance = measure_acceptance(self.recipe, self.target, self.held_out.once(), num_tokens)
        self.recipe.network.train()
        return acceptance

    def _evaluate(self) -> bool:
        """Add a point to the held-out curve; True when it has not risen for too long."""
        entry = {"step": self._step, **self.measure(self.settings.eval_tokens).to_dict()}
        self.history.held_out.append(entry)
        self.on_eval(entry)
        best = self.history.best
        assert best is not None
        if best is entry:
            self._best_state = {k: v.detach().clone() for k, v in self.recipe.network.state_dict().items()}
        since = [e["step"] for e in self.history.held_out].index(best["step"])
        return len(self.history.held_out) - 1 - since >= self.settings.patience

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.target.device.type == "cuda")

    def _save(self) -> None:
        if self.checkpoint is None:
            return
        state = {
            "step": self._step,
            "method": self.recipe.name,
            "settings": json.dumps(asdict(self.settings)),
            "history": json.dumps(asdict(self.history)),
            "network": self.recipe.network.state_dict(),
            "best": self._best_state,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)  # a kill leaves the old checkpoint or the new one, never half of one

    def _resume(self) -> None:
        if self.checkpoint is None or not self.checkpoint.is_file():
            return
        state = torch.load(self.checkpoint, map_location=self.target.device, weights_only=True)
        if state["method"] != self.recipe.name or json.loads(state["settings"]) != asdict(self.settings):
            raise InvalidOptionError(
                f"{self.checkpoint} belongs to another run (method {state['method']}, settings {state['settings']}). "
                "Train with the same settings to go on, or with another output folder to start anew."
            )
        self.recipe.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.history = History(**json.loads(state["history"]))
        self._best_state, self._step = state["best"], state["step"]


def learning_rate(step: int, settings: TrainSettings) -> float:
    """Linear warmup, then a cosine down to final_lr_share."""
    warmup = max(1, round(settings.steps * settings.warmup_share))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, settings.steps - warmup)
    floor = settings.final_lr_share
    return settings.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def make_optimizers(network: nn.Module, settings: TrainSettings) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices between vectors of the model and AdamW for the rest."""
    matrices: list[Tensor] = []
    vocabulary: list[Tensor] = []
    norms: list[Tensor] = []
    for name, parameter in network.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim < 2:
            norms.append(parameter)
        elif "lm_head" in name or "heads" in name:
            vocabulary.append(parameter)
        else:
            matrices.append(parameter)
    if settings.optimizer not in ("adamw", "muon"):
        raise InvalidOptionError(f"optimizer must be 'adamw' or 'muon', got {settings.optimizer!r}")
    muon = settings.optimizer == "muon"
    decay = settings.weight_decay
    groups = [
        {"params": [] if muon else matrices, "weight_decay": decay},
        {"params": vocabulary, "weight_decay": decay, "share": VOCABULARY_RATE},
        {"params": norms, "weight_decay": 0.0},
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.learning_rate, betas=(0.9, 0.95))
    ]
    if muon:
        optimizers.append(
            torch.optim.Muon(matrices, lr=settings.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers
