"""The command line as a person or a script meets it."""

import json
from collections.abc import Callable

import pytest

from paceline.cli import main as cli
from paceline.cli.demo import _result, _verdict
from paceline.models.loader import LoadedModel

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, smollm2_float32: LoadedModel) -> Run:
    """Run a verb in this process, on the model that the test session has loaded already."""
    import paceline.engine.build as build

    monkeypatch.setattr(build, "load_model", lambda name, **options: smollm2_float32)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_every_verb_has_a_file_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, "--help"])
        assert stop.value.code == 0
        assert "usage: paceline " + verb in capsys.readouterr().out


def test_generate_streams_text_and_json_agrees(run: Run) -> None:
    arguments = ("generate", "The capital of France is", "--max-tokens", "8", "--max-model-len", "128")
    code, out, err = run(*arguments)
    assert code == 0 and " Paris" in out and "tok/s" in err
    code, as_json, _ = run(*arguments, "--json", "--spec-method", "ngram")
    record = json.loads(as_json)
    assert code == 0 and record["text"] == out.rstrip("\n")
    assert record["metrics"]["num_output_tokens"] == len(record["token_ids"]) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--speculative-config", "{method: ngram}"), "not JSON"),
        (("--speculative-config", "[1]"), "JSON object"),
        (("--spec-method", "ngramm"), "ngram"),
        (("--temperature", "-1"), "temperature"),
        (("--max-model-len", "99999999"), "own context"),
    ],
)
def test_mistakes_end_with_one_line_and_code_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("generate", "Hello", *arguments)
    assert code == 2 and not out
    assert err.startswith("paceline: ") and message in err and "Traceback" not in err


def test_demo_ends_with_its_table_and_tells_whether_tokens_agree(run: Run) -> None:
    code, out, err = run("demo", "--max-tokens", "8", "--rounds", "1", "--max-model-len", "512", "--json")
    record = json.loads(out)
    assert code == 0 and len(record["results"]) == 5
    assert all(result["identical"] and result["plain_tok_s"] > 0 for result in record["results"])
    assert "tokens per pass" in err


def test_the_demo_reports_a_loss_and_a_difference() -> None:
    from paceline.cli.demo import Side

    slow = _result("chat", [Side([1, 2], 100.0, 1.0)], [Side([1, 2], 50.0, 1.2)])
    assert slow["speedup"] == 0.5 and "0.50x" in _verdict([slow]) and "lost on: chat" in _verdict([slow])
    wrong = _result("chat", [Side([1, 2], 100.0, 1.0)], [Side([1, 3], 150.0, 1.2)])
    assert not wrong["identical"] and "bug" in _verdict([wrong])
