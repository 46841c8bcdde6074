"""What each part of serving adds: combinations, the engines that they mean, and the table."""

import json
from pathlib import Path

import pytest

from paceline.bench.analyse.cells import analyse
from paceline.bench.analyse.contributions import contribution_rows
from paceline.bench.run.backend import Sampling
from paceline.bench.run.contributions import PARTS, ContributionPlan, combination_name, combinations, prompt_lines
from paceline.bench.run.format_grid import Format
from paceline.cli.main import main
from paceline.ops import native
from tests.bench.analyse.test_formats import record
from tests.models.quantized.quantized_folder import write_folder, write_plain_folder

PLAN = ContributionPlan(Format("f", "full"), Format("q", "small"), 8, "prompts.jsonl", 1, Sampling(max_tokens=4), 8)


def test_every_part_is_measured_alone_and_left_out() -> None:
    names = [combination_name(parts) for parts in combinations()]
    assert names == ["none", *PARTS, "all", *(f"all but {part}" for part in PARTS)]


def test_all_combinations_have_the_same_memory_for_keys_and_values() -> None:
    by_name = {form.name: form for form in PLAN.formats()}
    rooms = {form.options["block_size"] * form.options["num_kv_blocks"] for form in by_name.values()}
    assert len(rooms) == 1
    none, every = by_name["none"], by_name["all"]
    assert (none.model, every.model, by_name["all but quantization"].model) == ("full", "small", "full")
    assert none.options["max_num_seqs"] == 1 and by_name["batching"].options["max_num_seqs"] == 8
    assert none.options["block_size"] == none.options["max_model_len"] > by_name["paging"].options["block_size"]
    assert not none.options["enable_prefix_caching"] and by_name["prefix sharing"].options["enable_prefix_caching"]
    drafts = {setting.name: setting.config for setting in PLAN.grid().settings}
    assert drafts["all but speculation"] == {"method": "none"} and drafts["speculation"] == {"method": "auto"}


def test_prompts_begin_alike_and_end_differently() -> None:
    prompts = [json.loads(line)["prompt"] for line in prompt_lines(6)]
    assert len(set(prompts)) == 6 and len({prompt[:500] for prompt in prompts}) == 1


def test_the_table_has_ratios_within_a_round() -> None:
    speeds = {combination_name(parts): 100.0 * (1 + len(parts)) for parts in combinations()}
    records = []
    for name, speed in speeds.items():
        for repeat in (0, 1):  # the second round's machine is half as fast
            one = record("m", "none", 8, repeat, speed / (1 + repeat))
            one["cell"] |= {"setting": name, "format": name}
            records.append(one)
    rows = contribution_rows(analyse(records))
    assert [row["parts"] for row in rows] == [combination_name(parts) for parts in combinations()]
    assert rows[1]["of none"] == "2.00x" and rows[6]["of none"] == "6.00x" and rows[7]["of all"] == "0.83x"


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_the_command_runs_all_combinations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    write_plain_folder(tmp_path / "full", max_position_embeddings=2048)
    (tmp_path / "small").mkdir()
    write_folder(tmp_path / "small", "awq", lambda _, config: config.update(max_position_embeddings=2048))
    small = [
        "--users",
        "2",
        "--requests",
        "2",
        "--rounds",
        "1",
        "--max-tokens",
        "2",
        "--warm-up",
        "0",
        "--num-threads",
        "1",
    ]
    assert main(["bench", "contributions", "full", "small", *small, "--json", "--markdown", "table.md"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 12 and all(row["tok/s"] > 0 for row in found["rows"])
    assert "all but paging" in Path("table.md").read_text()
    assert main(["bench", "contributions", "full", "small", "--users", "0"]) == 2
    assert "1 or more" in capsys.readouterr().err
