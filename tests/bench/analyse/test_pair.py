"""The lab of a draft and a target model: what is measured, and what the page makes of it."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.analyse.cells import analyse
from paceline.bench.analyse.pair import (
    category_rows,
    pair_charts,
    position_rows,
    sweet_spots,
    tokens_per_pass,
    variant_rows,
    width_rows,
)
from paceline.bench.analyse.pair_page import pair_page
from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.run.grid import Setting
from paceline.bench.run.pair_grid import MULTI_STEP, NAIVE, WIDTH, PairPlan
from paceline.bench.run.results import Record, RecordFile
from paceline.bench.run.sweep import RunOptions, run_sweep
from paceline.bench.workloads.workload import Prompt
from paceline.cli.main import main
from paceline.core.draft_counts import DraftCounts
from paceline.lab.pass_cost import PassCost
from paceline.lab.speedup import Speculation, speedup
from paceline.spec.config.speculative_config import SpeculativeConfig
from tests.bench.toy_llm import FakeBackend

PLAN = PairPlan("large", "small", [2, 4], [1, 3], 3, [1, 4], ["code"], 1, Sampling(max_tokens=8))
CURVE = PassCost.of({1: 0.010, 5: 0.012, 20: 0.040})


class PairBackend(FakeBackend):
    """Accepts half of the drafts to each position; wider trees and multi-step sampling accept more."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting

    async def generate(self, prompt: Prompt, sampling: Sampling, index: int) -> Answer:
        answer = await super().generate(prompt, sampling, index)
        k = self.setting.num_speculative_tokens or 0
        width = int(self.setting.name.split()[-1]) if "width" in self.setting.name else 0
        steps = 8 - k - width - (1 if self.setting.name.startswith(MULTI_STEP) else 0)
        accepted = [4 // 2**i for i in range(k)]
        answer.counts = DraftCounts(8, 8 * k, accepted, 8, num_steps=max(1, steps))
        return answer

    def figures(self) -> dict[str, float]:
        return {"num_passes": 10.0 * self.num_asked, "draft_s": 0.02 * self.num_asked}


@pytest.fixture
def records(tmp_path: Path) -> list[Record]:
    file = RecordFile(str(tmp_path / "pair.jsonl"))
    for grid in PLAN.grids():
        run_sweep(grid, PairBackend, file, RunOptions(num_warm_up=0), lambda line: None)
    return file.records


def test_every_setting_is_one_that_the_engine_takes() -> None:
    for grid in PLAN.grids():
        grid.check()
        for setting in grid.settings:
            SpeculativeConfig.parse(setting.config or {})
    chains, trees, rules = (grid.settings for grid in PLAN.grids())
    assert [setting.name for setting in chains] == ["plain", "K=2", "K=4"]
    assert [(setting.config or {}).get("tree_widths") for setting in trees] == [[1, 1, 1], [3, 1, 1]]
    assert {(setting.config or {})["rejection_sample_method"] for setting in rules} == {"multi_step", "sample_match"}
    assert all((setting.config or {})["draft_sampling"] == "sampled" for setting in rules)


def test_chains_that_stop_and_the_files_own_weights_stand_beside_the_others() -> None:
    plan = replace(PLAN, min_probs=[0.5], file_ks=[2], studies=["chains"])
    [chains] = plan.grids()
    configs = {setting.name: setting.config or {} for setting in chains.settings}
    assert list(configs) == ["plain", "K=2", "K=4", "until 0.5, K=4", "the file's weights, K=2"]
    for config in configs.values():
        SpeculativeConfig.parse(config)
    assert configs["until 0.5, K=4"]["draft_min_prob"] == 0.5
    assert configs["the file's weights, K=2"]["draft_quantization"] == "file"


def test_ways_to_draft_and_positions_are_listed(records: list[Record]) -> None:
    analysis = analyse(records)
    rows = variant_rows(analysis)
    assert [(row["users"], row["drafts"]) for row in rows] == [(1, "K=2"), (1, "K=4"), (4, "K=2"), (4, "K=4")]
    assert all(row["speedup"] is not None for row in rows)
    [positions] = position_rows(analysis)
    assert positions["workload"] == "code" and positions["1"] > positions["2"]


def test_the_prediction_is_the_labs_with_the_measured_acceptance(records: list[Record]) -> None:
    spots = sweet_spots(analyse(records), CURVE)
    assert [spot.point.concurrency for spot in spots] == [1, 4]
    largest = next(r for r in records if r["cell"]["setting"] == "K=4" and r["cell"]["concurrency"] == 4)["summary"]
    reach = largest["speculation"]["acceptance_by_position"]
    rates = [reach[0], *(after / before if before else 0.0 for before, after in itertools.pairwise(reach))]
    draft_s = largest["engine"]["draft_s"] / largest["engine"]["num_passes"] / 4
    expected = {k: speedup(Speculation(rates, draft_s, pass_cost=CURVE, batch=4), k) for k in (2, 4)}
    assert spots[1].predicted == pytest.approx(expected)
    row = spots[0].row()
    assert row["best K"] == max({0: 1.0} | spots[0].measured, key=({0: 1.0} | spots[0].measured).__getitem__)


def test_acceptance_is_given_by_category(records: list[Record]) -> None:
    rows = category_rows(analyse(records))
    assert rows and all(row["K=4"] > row["K=2"] > 1 for row in rows)


def test_without_a_curve_nothing_is_predicted(records: list[Record]) -> None:
    spots = sweet_spots(analyse(records), None)
    assert all(spot.predicted == {} and spot.row()["predicted there"] is None for spot in spots)


def test_widths_and_rules_stand_side_by_side(records: list[Record]) -> None:
    analysis = analyse(records)
    assert tokens_per_pass(analysis, WIDTH)["code"][3] > tokens_per_pass(analysis, WIDTH)["code"][1]
    rows = width_rows(analysis)
    assert [row["width"] for row in rows] == [1, 3]
    assert all(row["multi-step gains"] > 0 for row in rows)
    assert set(tokens_per_pass(analysis, NAIVE)) == {"code"}


def test_the_page_has_the_tables_and_the_pictures(records: list[Record]) -> None:
    pytest.importorskip("matplotlib")
    assert [chart.title for chart in pair_charts(records, CURVE)] == [
        "Speedup over K: code, 1 user",
        "Speedup over K: code, 4 users",
        "Tokens per pass over the tree's width (greedy)",
        "Multi-step against naive sampling (T=1)",
    ]
    page = pair_page(records, CURVE, "small drafting for large")
    for text in (
        "The sweet spot",
        "Acceptance by category",
        "K the model would take",
        "multi-step gains",
        "Acceptance by position",
        "<svg",
    ):
        assert text in page


@pytest.mark.parametrize("arguments, message", [(["--k", "0"], "1 or more"), (["--model", "x"], "leave --model out")])
def test_bad_arguments_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "pair", "large", "small", *arguments]) != 0
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_pair_whose_vocabularies_differ_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tokenizers

    from tests.models.quantized.quantized_folder import write_plain_folder

    monkeypatch.chdir(tmp_path)
    for name in ("large", "small"):
        write_plain_folder(tmp_path / name)
    tokenizer = tokenizers.Tokenizer.from_file("small/tokenizer.json")
    tokenizer.add_tokens(["<other>"])
    tokenizer.save("small/tokenizer.json")
    assert main(["bench", "pair", "large", "small"]) == 2
    assert "not all the same: the lab of a pair needs two models with one vocabulary" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "small"]
