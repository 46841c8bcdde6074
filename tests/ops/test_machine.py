"""The instruction sets that a run is held to are those that run."""

import os
from collections.abc import Callable

import pytest
import torch

from paceline.errors import InvalidOptionError
from paceline.ops import native
from paceline.ops.native.library import INSTRUCTION_SET_VARIABLE, LIBRARY_VARIABLE, load


def test_what_runs_is_what_was_asked_for(record_property: Callable[[str, object], None]) -> None:
    """The report says which kernels ran, for tests/test_other_machines.py."""
    found = native.instruction_set() if native.available() else "none"
    capability = torch.backends.cpu.get_cpu_capability()
    record_property("native", found)
    record_property("torch", capability)
    assert os.environ.get(INSTRUCTION_SET_VARIABLE, found) == found
    assert os.environ.get("ATEN_CPU_CAPABILITY", capability).upper() == capability


def test_without_the_library_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIBRARY_VARIABLE, "absent.so")
    found, reason = load.__wrapped__()
    assert found is None and "absent.so is missing" in str(reason)


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = native.instruction_set()
    monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, "portable")
    try:
        assert load.__wrapped__()[1] is None
        assert native.instruction_set() == "portable"
        monkeypatch.setenv(INSTRUCTION_SET_VARIABLE, "sse9")
        with pytest.raises(InvalidOptionError, match=f"'sse9' .asked for by {INSTRUCTION_SET_VARIABLE}"):
            load.__wrapped__()
    finally:
        native.select_instruction_set(before)
