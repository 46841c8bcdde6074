"""A whole training on a tiny model: it learns, survives a kill, refuses what it cannot use."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.cli.main import main
from paceline.errors import InvalidOptionError
from paceline.train.corpus import Corpus
from paceline.train.run import Plan, choose_vocabulary, mean_right_drafts, train_drafter, train_pool
from paceline.train.target import DenseTarget
from tests.models.small_gguf import write_model
from tests.models.small_models import hf_model
from tests.train.tiny_target import tiny_corpus, tiny_target

PLAN = Plan(
    "eagle3",
    steps=40,
    batch_tokens=2048,
    learning_rate=3e-3,
    draft_vocab_size=48,
    held_out_share=0.2,
    eval_every=20,
    checkpoint_every_s=0.0,
)
# Runs the same training as the test does, in a process that can be killed.
SCRIPT = """
import sys, torch
from pathlib import Path
from tests.train.test_train_run import PLAN, train_drafter
from tests.train.tiny_target import tiny_corpus, tiny_target
torch.set_num_threads(1)
target = tiny_target()
def on_step(step, entry):
    print(step, flush=True)
train_drafter(PLAN, target, tiny_corpus(target, 80), Path(sys.argv[1]), on_step=on_step)
"""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> DenseTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: DenseTarget) -> Corpus:
    return tiny_corpus(target, 80)


def test_killed_and_called_again_ends_with_the_same_drafter(
    target: DenseTarget, corpus: Corpus, tmp_path: Path
) -> None:
    whole = train_drafter(PLAN, target, corpus, tmp_path / "whole")
    chance = 1 + 1 / 48
    assert whole.report["held_out"]["4"]["mean_acceptance_length"] > chance + 0.15
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "killed")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) >= 12:
                break
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "killed" / "eagle3.safetensors").exists(), "it was meant to be killed before its end"
    seen: list[int] = []
    resumed = train_drafter(PLAN, target, corpus, tmp_path / "killed", on_step=lambda step, entry: seen.append(step))
    assert seen[0] >= 12, "it began anew instead of going on"
    first, second = load_file(whole.path), load_file(resumed.path)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_folder_belongs_to_one_plan(target: DenseTarget, corpus: Corpus, tmp_path: Path) -> None:
    train_drafter(replace(PLAN, steps=2), target, corpus, tmp_path)
    with pytest.raises(InvalidOptionError, match="another --output"):
        train_drafter(replace(PLAN, steps=3), target, corpus, tmp_path)


def test_the_second_of_a_pool_learns_what_the_first_misses(target: DenseTarget, corpus: Corpus, tmp_path: Path) -> None:
    plan = replace(PLAN, method="draft", steps=30, options={"num_layers": 1})
    first, second = train_pool(plan, target, corpus, tmp_path, 2)
    assert second.report["answers"] == len(corpus) // 2
    right = mean_right_drafts(first.recipe, target, corpus, 2048)
    hardest = corpus.select(sorted(right.argsort(kind="stable")[: len(corpus) // 2]))
    by_first, by_second = (
        mean_right_drafts(trained.recipe, target, hardest, 2048).mean() for trained in (first, second)
    )
    gains = by_second - by_first
    assert gains > 0


def test_the_draft_vocabulary_covers_the_answers(corpus: Corpus) -> None:
    ids, coverage = choose_vocabulary(replace(PLAN, draft_vocab_size=None), corpus, 64)
    assert coverage >= 0.97 and len(ids) <= 64
    with pytest.raises(InvalidOptionError, match="2 to 64"):
        choose_vocabulary(replace(PLAN, draft_vocab_size=65), corpus, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path, hf_model("llama-tied"))
    return path


def write_prompts(path: Path, count: int) -> Path:
    """The tiny model's tokenizer knows the letters a and b."""
    texts = [f"{i:08b}".replace("0", "a").replace("1", "b") for i in range(count)]
    rows = [{"prompt": text, "chat": False} for text in texts]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def command(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    sizes = ["--answer-tokens", "12", "--steps", "12", "--eval-every", "6", "--held-out", "0.3", "--num-threads", "1"]
    return ["train", *more, "--model", str(model), "--data", str(data), "--output", str(output), *sizes]


@pytest.mark.parametrize("method", ["eagle3", "eagle", "medusa", "dflash", "draft", "pool"])
def test_the_verb_writes_a_drafter_and_a_report(
    method: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_s = time.perf_counter()
    assert main(command(model, write_prompts(tmp_path / "p.jsonl", 16), tmp_path / "out", method)) == 0
    assert time.perf_counter() - begin_s < 60
    folders = [tmp_path / "out" / f"draft-{i}" for i in (1, 2)] if method == "pool" else [tmp_path / "out"]
    for folder in folders:
        report: dict[str, Any] = json.loads((folder / "report.json").read_text())
        assert report["steps"] == 12 and len(report["held_out"]["4"]["per_position"]) == 4
        assert "<svg" in (folder / "acceptance.svg").read_text()
        assert len(list(folder.glob("*.safetensors"))) >= 1
    assert "tokens per pass" in capsys.readouterr().out


def test_a_training_without_matplotlib_has_no_curves_and_says_why(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command(model, write_prompts(tmp_path / "p.jsonl", 16), tmp_path / "out", "medusa")) == 0
    assert "no curves (a picture needs matplotlib: pip install 'paceline[plot]')" in capsys.readouterr().out
    assert (tmp_path / "out" / "report.json").exists() and not (tmp_path / "out" / "acceptance.svg").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [("{]", "not JSON"), ('{"other": 1}', "expected 'turns'"), ('{"prompt": "a"}', "at least 8"), ("", "no prompt")],
)
def test_wrong_data_is_refused(
    content: str, message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "p.jsonl"
    data.write_text(content)
    assert main(command(model, data, tmp_path / "out", "eagle3")) == 2
    assert message in capsys.readouterr().err
