"""`paceline serve`: its options become the server's, and asking for help loads nothing heavy."""

import argparse
import subprocess
import sys
from typing import Any

import pytest

from paceline.cli import serve


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(arguments))


def test_it_listens_on_this_machine_only_by_default(started: dict[str, Any]) -> None:
    assert run() == 0
    assert (started["host"], started["port"]) == ("127.0.0.1", 8000)
    assert started["config"].model_names == (started["model"],)
    assert started["config"].api_keys == () and started["config"].cors_origins == ()
    assert started["speculative"] is None
    assert started["options"]["max_token_delay_s"] == 0.02 and started["ready"]
    assert started["structured"] and started["config"].tool_call_parser is None


def test_options_reach_the_engine_and_the_server(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(serve.API_KEY_VARIABLE, "second,third")
    run("some-model", "--spec-method", "ngram", "--spec-tokens", "6", "--api-key", "first", "--max-queue-len", "3",
        "--max-num-seqs", "5", "--no-prefix-caching", "--served-model-name", "a", "--served-model-name", "b",
        "--request-timeout", "7.5", "--cors-origin", "http://page.example", "--log-prompts",
        "--tool-call-parser", "hermes", "--max-stored-responses", "7")  # fmt: skip
    assert started["model"] == "some-model"
    assert started["speculative"] == {"method": "ngram", "num_speculative_tokens": 6}
    assert started["options"]["max_num_seqs"] == 5 and started["options"]["enable_prefix_caching"] is False
    config = started["config"]
    assert config.model_names == ("a", "b") and config.api_keys == ("first", "second", "third")
    assert config.max_queue_len == 3 and config.request_timeout_s == 7.5 and config.log_prompts
    assert config.cors_origins == ("http://page.example",)
    assert config.tool_call_parser == "hermes" and config.max_stored_responses == 7


def test_requests_may_choose_what_needs_no_setting_up(started: dict[str, Any]) -> None:
    run()
    assert {"ngram", "prediction"} <= set(started["backend"])
    assert not {"none", "oracle"} & set(started["backend"])


def test_without_the_extra_it_says_what_to_install(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run() == 2
    assert "pip install 'paceline[serve]'" in capsys.readouterr().err


def test_help_loads_neither_torch_nor_the_web_framework() -> None:
    code = "import sys, paceline.cli.serve; print([m for m in ('torch', 'fastapi', 'uvicorn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
