"""`paceline quantize` and `paceline bench quantization`, from a small random model to a page."""

import json
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.ops import native
from tests.models.quantized.quantized_folder import write_plain_folder

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of plain text; the model is in `plain`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    write_plain_folder(tmp_path / "plain")
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ran after the cat " * 40)
    return "text.txt"


def quantize(text: str, *arguments: str) -> int:
    return main(["quantize", "plain", "--calibration", text, "--held-out", text, "--samples", "4", *arguments])


def test_a_model_becomes_a_folder_and_a_report(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize(text, "--method", "gptq", "--out", "made", "--json") == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert report["recipe"]["method"] == "gptq" and report["recipe"]["group_size"] == 64
    assert "layer 2/2" in said.err
    assert quantize(text, "--method", "fp8", "--out", "other") == 0
    table = capsys.readouterr().out
    assert "KL, nats per token" in table and "same likeliest token" in table and "MB" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "awq", "--group-size", "48"], "do not divide into groups of 48"),
        (["--method", "awq", "--samples", "0"], "at least 1 passage"),
        (["--method", "int8", "--calibration", "nothing.txt"], "nothing.txt"),
    ],
)
def test_bad_arguments_are_refused_and_leave_nothing(
    arguments: list[str], message: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantize(text, "--out", "made", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not Path("made").exists()


def test_formats_are_compared_on_one_page(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert quantize(text, "--method", "awq", "--out", "awq") == 0
    prompts = [json.dumps({"prompt": f"the cat sat on {i} the cat sat on", "chat": False}) for i in range(4)]
    Path("prompts.jsonl").write_text("\n".join(prompts))
    capsys.readouterr()
    small = [
        "--users",
        "1",
        "2",
        "--rounds",
        "2",
        "--requests",
        "2",
        "--max-tokens",
        "6",
        "--warm-up",
        "0",
        "--num-threads",
        "1",
    ]
    files = ["--workload", "prompts.jsonl", "--held-out", text, "--markdown", "table.md", "--plots", "plots"]
    command = [
        "bench",
        "quantization",
        "plain@float32",
        "awq",
        "--drafter",
        "ngram",
        "eagle3",
        *small,
        *files,
        "--json",
    ]
    assert main(command) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert "eagle3 is left out on awq" in said.err
    assert [row["format"] for row in found["matrix"]] == ["plain@float32", "awq"]
    assert found["matrix"][0]["KL"] == 0 and found["matrix"][1]["KL"] > 0
    assert found["matrix"][1]["MB"] < found["matrix"][0]["MB"]
    assert {(row["format"], row["drafter"]) for row in found["drafters"]} == {
        ("plain@float32", "ngram"),
        ("awq", "ngram"),
    }
    assert "Recommended" in Path("quantization.html").read_text() and "| format |" in Path("table.md").read_text()
    assert len(list(Path("plots").iterdir())) == 4
    assert main(command) == 0  # goes on where it was: nothing is left to run
    assert "recorded in quantization.jsonl; going on with the rest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one"], "two formats or more"),
        (["a", "b", "--model", "x"], "leave --model out"),
        (["a", "b", "--dtype", "float32"], "leave --dtype out"),
        (["a", "b", "--rounds", "0"], "1 or more"),
    ],
)
def test_bad_comparisons_are_refused_before_anything_is_measured(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "quantization", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
