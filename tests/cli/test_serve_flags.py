"""`paceline serve` under vLLM's flags: the same meaning, no effect with a notice, or refused with the reason."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import serve
from paceline.core.foreign_options import ENGINE, SERVE
from paceline.errors import InvalidOptionError


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(serve.expand_arguments(words)))


def test_flags_of_vllm_mean_the_same(started: dict[str, Any]) -> None:
    run("m", "--served-model-name", "a", "b", "--no-enable-prefix-caching", "--num-gpu-blocks-override", "99",
        "--allowed-origins", '["http://a.example", "http://b.example"]', "--dtype", "half", "--block-size", "32",
        "--generation-config", "vllm", "--override-generation-config", '{"temperature": 0.5}', "--reasoning-parser",
        "qwen3", "--chat-template", "{{ messages }}", "--api-key", "one", "two", "--strict")  # fmt: skip
    config, options = started["config"], started["options"]
    assert config.model_names == ("a", "b") and config.api_keys == ("one", "two") and config.strict
    assert config.cors_origins == ("http://a.example", "http://b.example") and config.reasoning_parser == "qwen3"
    assert options["enable_prefix_caching"] is False and options["num_kv_blocks"] == 99 and options["block_size"] == 32
    assert options["dtype"] == "half" and options["chat_template"] == "{{ messages }}"
    assert options["generation_config"] == "vllm" and options["override_generation_config"] == {"temperature": 0.5}


def test_flags_that_ask_for_nothing_are_named_in_one_line(
    started: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        run("m", "-tp", "1", "--gpu-memory-utilization", "0.9", "--enforce-eager", "--no-enable-chunked-prefill",
            "--kv-cache-dtype", "auto", "--disable-log-requests", "--trust-remote-code",
            "--swap-space", "0")  # fmt: skip
    (line,) = [record.getMessage() for record in caplog.records]
    assert all(name in line for name in ("tensor_parallel_size", "swap_space", "disable_log_requests"))
    assert not set(started["options"]) & set(ENGINE)


@pytest.mark.parametrize(
    "words", ["--tensor-parallel-size 2", "--cpu-offload-gb 4", "--ssl-keyfile k", "--enable-lora"]
)
def test_flags_that_ask_for_something_are_refused_with_the_reason(started: dict[str, Any], words: str) -> None:
    name = words.split()[0].strip("-").replace("-", "_")
    with pytest.raises(InvalidOptionError) as refused:
        run("m", *words.split())
    assert (ENGINE | SERVE)[name].reason in str(refused.value) and not started


def test_a_type_of_keys_that_does_not_exist_is_refused(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("m", "--kv-cache-dtype", "fp8")
    assert "'auto', 'float16', 'int16', 'int8'" in capsys.readouterr().err and not started
    run("m", "--kv-cache-dtype", "int8")
    assert started["options"]["kv_cache_dtype"] == "int8"


def test_a_file_may_hold_them_too(started: dict[str, Any], tmp_path: Path) -> None:
    options = {"enforce_eager": True, "tensor-parallel-size": 1, "served_model_name": ["a", "b"], "strict": True}
    options |= {"compilation_config": {"level": 3}, "override_generation_config": {"top_k": 5}}
    (tmp_path / "serve.json").write_text(json.dumps(options))
    run("m", "--config", str(tmp_path / "serve.json"))
    assert started["config"].model_names == ("a", "b") and started["config"].strict
    assert started["options"]["override_generation_config"] == {"top_k": 5}
