"""What the tests of the native kernels share."""

from collections.abc import Iterator

import pytest

from paceline.errors import InvalidOptionError
from paceline.ops import native
from paceline.ops.native import INSTRUCTION_SETS


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every one that this machine has, in turn."""
    best = native.instruction_set()
    try:
        native.select_instruction_set(request.param)
    except InvalidOptionError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    native.select_instruction_set(best)
