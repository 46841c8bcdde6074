"""`serve --config FILE`: the file's options stand in front of the command line's, and mistakes are explained."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.main import main

OPTIONS: dict[str, Any] = {
    "model": "some-model",
    "port": 9000,
    "max-num-seqs": 5,
    "no_prefix_caching": True,
    "log_prompts": False,
    "max_prompt_tokens": None,
    "served_model_name": ["a", "b"],
    "speculative_config": {"method": "suffix", "num_speculative_tokens": 8},
}


def write(folder: Path, options: Any, name: str = "serve.json") -> str:
    path = folder / name
    path.write_text(options if isinstance(options, str) else json.dumps(options))
    return str(path)


def test_options_in_a_file_work_as_on_the_command_line(tmp_path: Path, started: dict[str, Any]) -> None:
    assert main(["serve", "--config", write(tmp_path, OPTIONS)]) == 0
    assert started["model"] == "some-model" and started["port"] == 9000
    assert started["options"]["max_num_seqs"] == 5 and started["options"]["enable_prefix_caching"] is False
    assert started["config"].model_names == ("a", "b") and not started["config"].log_prompts
    assert started["speculative"] == OPTIONS["speculative_config"]


def test_yaml_and_json_files_give_the_same_options(tmp_path: Path, started: dict[str, Any]) -> None:
    text = "port: 9000\nspeculative_config:\n  method: suffix\n  num_speculative_tokens: 8\n"
    assert main(["serve", f"--config={write(tmp_path, text, 'serve.yaml')}"]) == 0
    assert started["port"] == 9000 and started["speculative"] == OPTIONS["speculative_config"]


def test_the_command_line_wins_on_either_side_of_the_file(tmp_path: Path, started: dict[str, Any]) -> None:
    path = write(tmp_path, OPTIONS)
    for arguments in (["--port", "8000", "--config", path], ["--config", path, "--port", "8000"]):
        main(["serve", *arguments, "--spec-method", "none"])
        assert started["port"] == 8000 and started["options"]["max_num_seqs"] == 5
        assert started["speculative"] == {"method": "none"}


def test_the_command_line_takes_a_switch_back(tmp_path: Path, started: dict[str, Any]) -> None:
    path = write(tmp_path, {"no_prefix_caching": True, "log_prompts": True})
    main(["serve", "--config", path])
    assert started["config"].log_prompts and not started["options"]["enable_prefix_caching"]
    main(["serve", "--config", path, "--prefix-caching", "--no-log-prompts"])
    assert not started["config"].log_prompts and started["options"]["enable_prefix_caching"]
    main(["serve", "--config", write(tmp_path, {"prefix_caching": False, "no_log_prompts": False})])
    assert started["config"].log_prompts and not started["options"]["enable_prefix_caching"]


@pytest.mark.parametrize("abbreviated", [["--conf", "no-such-file.json"], ["--spec-met", "none"]], ids=str)
def test_an_abbreviation_is_refused_because_the_file_would_not_see_it(
    started: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    abbreviated: list[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *abbreviated])
    assert f"unrecognized arguments: {abbreviated[0]}" in capsys.readouterr().err and not started


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"prot": 9000}, "Did you mean 'port'"),
        ({"config": "other.json"}, "unknown key 'config'"),
        ([1], "options by name"),
        ({"no_prefix_caching": "yes"}, "true or false"),
        ({"no_port": 1}, "unknown key 'no_port'"),
        ({"no_port": True}, "unknown key 'no_port'"),
        ({"port": True}, "takes a value"),
        ({"host": {"name": "here"}}, "takes a value"),
        ({"max-num-seqs": 5, "max_num_seqs": 6}, "says 'max_num_seqs' twice"),
        ({"prefix_caching": True, "no-prefix-caching": True}, "says 'prefix_caching' twice"),
        ({"served_model_name": ["a", None]}, "got None"),
        ({"cors_origin": [True]}, "got True"),
        ({"port": [1, 2]}, "one value"),
        ("port = 9000", "is not JSON"),
    ],
    ids=str,
)
def test_a_wrong_file_is_explained(
    tmp_path: Path,
    started: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    content: Any,
    says: str,
) -> None:
    assert main(["serve", "--config", write(tmp_path, content)]) == 2
    assert says in capsys.readouterr().err and not started


@pytest.mark.parametrize(
    ("text", "secret"),
    [("api_key: 0123", "83"), ("api_key: [good, 0123]", "83"), ("api_key: [null]", "None"), ("api_key:", "None")],
)
def test_a_key_is_text_or_refused_and_is_not_shown(
    tmp_path: Path,
    started: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    text: str,
    secret: str,
) -> None:
    assert main(["serve", "--config", write(tmp_path, text, "serve.yaml")]) == 2
    said = capsys.readouterr().err
    assert "put it in quotes" in said and f" {secret}" not in said and not started
    assert main(["serve", "--config", write(tmp_path, {"api_key": ["0123", "b"]})]) == 0
    assert started["config"].api_keys == ("0123", "b")


def test_a_missing_file_and_broken_yaml_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "nothing.json")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["serve", "--config", write(tmp_path, "a: [1", "serve.yml")]) == 2
    assert "is not YAML" in capsys.readouterr().err


def test_values_are_checked_as_if_they_were_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--config", write(tmp_path, {"port": "many"})])
    assert "invalid int value: 'many'" in capsys.readouterr().err
