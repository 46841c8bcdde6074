"""What `bench quantization` runs: formats by name, drafters where they fit, each round through all of them."""

import pytest

from paceline.bench.run.backend import Sampling
from paceline.bench.run.format_grid import Format, FormatPlan, check_formats, parse_drafters, parse_format
from paceline.bench.run.grid import Setting
from paceline.errors import InvalidOptionError
from paceline.spec.config.speculative_config import SpeculativeConfig

FLOAT32 = {"dtype": "float32", "quantization": None}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("smollm2-135m", Format("smollm2-135m", "smollm2-135m")),
        ("smollm2-135m@float32", Format("smollm2-135m@float32", "smollm2-135m", FLOAT32)),
        ("smollm2-135m@int8", Format("smollm2-135m@int8", "smollm2-135m", {"quantization": "int8"})),
        ("made/awq", Format("awq", "made/awq")),
        ("mine=made/awq@float32", Format("mine", "made/awq", FLOAT32)),
        ("user@home/awq", Format("awq", "user@home/awq")),
        ("made/a=b", Format("a=b", "made/a=b")),
    ],
)
def test_a_format_is_a_model_and_how_it_is_held(text: str, expected: Format) -> None:
    assert parse_format(text) == expected


@pytest.mark.parametrize(
    ("texts", "message"),
    [(["one"], "two formats or more"), (["a/x", "b/x"], "one name: x, x"), (["x=", "y"], "names no model")],
)
def test_formats_that_cannot_be_told_apart_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        check_formats([parse_format(text) for text in texts])


def test_every_round_goes_through_all_formats_and_drafters_run_where_they_fit() -> None:
    formats = [Format("full", "m"), Format("awq", "f")]
    both = parse_drafters(["ngram"], ["price"])
    drafters = {"full": {"none": both["none"], "ngram": both["ngram by price"]}, "awq": {"none": both["none"]}}
    plan = FormatPlan(formats, drafters, [1, 8], [1], "chat", 2, Sampling(max_tokens=8))
    drafted, plain = plan.grids()
    assert [setting.name for setting in drafted.settings] == ["full, none", "full, ngram", "awq, none"]
    assert [setting.config for setting in drafted.settings] == [
        {"method": "none"},
        {"method": "ngram"},
        {"method": "none"},
    ]
    assert [load.concurrency for load in plain.loads] == [8]
    for grid in (drafted, plain):
        orders = [[cell.setting.form for cell in grid.cells() if cell.repeat == repeat] for repeat in (0, 1)]
        assert sorted(map(str, orders[0])) == sorted(map(str, orders[1])) and orders[0] != orders[1]
    assert {cell.describe()["format"] for cell in plain.cells()} == {"full", "awq"}


def test_a_drafter_named_without_a_size_has_its_default_or_what_pays() -> None:
    given = [
        "none",
        "ngram",
        "suffix:8",
        "auto",
        'small={"method": "draft_model", "model": "m", "draft_min_prob": 0.5}',
    ]
    fixed, priced = parse_drafters(given, ["default"]), parse_drafters(given, ["price"])
    assert fixed == {
        "none": {"method": "none"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 4},
        "suffix:8": {"method": "suffix", "num_speculative_tokens": 8},
        "auto": {"method": "auto"},
        "small": {"method": "draft_model", "model": "m", "draft_min_prob": 0.5, "num_speculative_tokens": 4},
    }
    assert list(priced) == ["none", "ngram by price", "suffix:8", "auto", "small by price"]
    for configs, is_priced in ((fixed, False), (priced, True)):
        for name, config in configs.items():
            parsed = SpeculativeConfig.parse(config)
            assert parsed is not None and parsed.sized_by_price == (is_priced and name.endswith("by price"))
    assert len(parse_drafters(given, ["default", "price"])) == len(fixed) + 2


def test_a_setting_of_one_model_is_described_as_before() -> None:
    from paceline.bench.run.grid import Cell
    from paceline.bench.run.load import Load

    assert "format" not in Cell(Setting("plain", {"method": "none"}), "chat", 0.0, Load(concurrency=1), 0).describe()
