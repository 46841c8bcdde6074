"""The list that is installed holds the clients of pyproject.toml, in the same versions."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_client_is_installed_in_the_version_that_pyproject_names() -> None:
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["clients"]
    lines = (ROOT / "tests" / "clients" / "requirements.txt").read_text().splitlines()
    installed = {line for line in lines if not line.startswith("#")}
    assert {re.sub(r"\[.*\]", "", client) for client in extra} <= installed
