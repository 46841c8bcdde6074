"""Clients from npm on the default model: `openai`, and `ai` over both of its interfaces."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL
from tests.clients.shapes import Weather

NODE = Path(__file__).parent / "node"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js"),
    pytest.mark.skipif(
        not (NODE / "node_modules" / ".installed").is_file(), reason="needs packages from npm: make test-clients"
    ),
]


def run(script: str, base_url: str) -> Any:
    done = subprocess.run(["node", script, base_url, MODEL], cwd=NODE, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_openai_parses_and_streams_calls_and_responses(base_url: str) -> None:
    found = run("openai.mjs", base_url)
    assert found["trip"]["by"] in ("train", "bus") and found["finish"] == "tool_calls"
    assert found["call"]["name"] == "weather" and found["call"]["arguments"] == found["deltas"]
    Weather.model_validate_json(found["deltas"])
    (call,) = found["output"]
    assert call["type"] == "function_call" and call["arguments"] == found["told"]
    Weather.model_validate_json(found["told"])
    assert found["types"][0] == "response.created" and found["types"][-1] == "response.completed"


def test_ai_gives_objects_and_calls_over_chat_and_responses(base_url: str) -> None:
    for found in run("ai.mjs", base_url).values():
        assert found["trip"]["by"] in ("train", "bus") and found["finish"] == "tool-calls"
        assert json.loads(found["deltas"]) == found["input"]
        Weather.model_validate(found["input"])
