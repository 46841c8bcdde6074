"""Fixtures that every test may use."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.models.learned_cache import FOLDER_VARIABLE, OFF
from paceline.models.loader import LoadedModel
from paceline.ops import native
from paceline.ops.native.library import INSTRUCTION_SET_VARIABLE
from paceline.spec.drafter_faults import DrafterFaults


def pytest_configure() -> None:
    os.environ[FOLDER_VARIABLE] = OFF  # here and in servers that tests start: no test knows what another one learned
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        # Read when a worker loads PyTorch: two threads on its one core are to take turns, not to spin.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    elif hasattr(os, "sched_setaffinity"):
        _take_a_share_of_the_cores(int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


def _take_a_share_of_the_cores(worker: int, num_workers: int) -> None:
    """Each worker of pytest-xdist keeps to its own cores, and so do the servers and programs that its tests start.

    Otherwise threads of two workers spin for one core, and a test that measures time measures its neighbour's tests."""
    cores = sorted(os.sched_getaffinity(0))
    share = cores[worker::num_workers] or cores
    os.sched_setaffinity(0, share)
    torch.set_num_threads(len(share))


@pytest.fixture(autouse=True)
def no_hidden_faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine survives a drafter, a verifier or an observer that raises, and logs it. A test must not survive it,
    unless it is about that: `@pytest.mark.faults`."""
    if request.node.get_closest_marker("faults") is not None:
        yield
        return
    monkeypatch.setattr(DrafterFaults, "note", _raise_again)
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("paceline")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    raised = [record for record in records if record.name == "paceline" and record.exc_info]
    assert not raised, [(record.getMessage(), record.exc_info) for record in raised]


def _raise_again(faults: DrafterFaults, method: str, error: BaseException) -> None:
    raise error


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


@pytest.fixture(params=native.usable_instruction_sets() or ["none"])
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """The native kernels in every one that this machine has, in turn; in a run that was asked for one, in that one."""
    best = native.instruction_set()
    if os.environ.get(INSTRUCTION_SET_VARIABLE, request.param) != request.param:
        pytest.skip(f"this run is held to {best}")
    native.select_instruction_set(request.param)
    yield request.param
    native.select_instruction_set(best)
