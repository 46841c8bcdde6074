"""Fixtures that every test may use."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder, fetched into the cache the first time."""
    from paceline.models.resolve import resolve_model

    return resolve_model("smollm2-135m", progress=False)
