"""Fixtures that every test may use."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import InvalidOptionError
from paceline.models.loader import LoadedModel
from paceline.ops import native


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


@pytest.fixture(params=native.INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernels in every one that this machine has, in turn."""
    best = native.instruction_set()
    try:
        native.select_instruction_set(request.param)
    except InvalidOptionError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    native.select_instruction_set(best)
