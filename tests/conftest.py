"""Fixtures that every test may use."""

from pathlib import Path

import pytest

from paceline.models.loader import LoadedModel


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's folder, fetched into the cache the first time."""
    from paceline.models.resolve import resolve_model

    return resolve_model("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def smollm2_float32() -> LoadedModel:
    """The default model as the float32 CPU path runs it: row-independent, so exactness is bit for bit."""
    from paceline.models.loader import load_model

    return load_model("smollm2-135m", dtype="float32", device="cpu", quiet=True)
