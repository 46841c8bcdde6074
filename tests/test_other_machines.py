"""The kernel and exactness tests as on other machines, which this one imitates: narrower vectors, or no compiler.

Each machine is an environment. A second pytest runs the tests below in it, and its report must say that they ran, and
on which kernels. Threads (one and two) and tensors that lie elsewhere are varied inside these tests.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.errors import InvalidOptionError
from paceline.ops import native
from paceline.ops.native.library import INSTRUCTION_SET_VARIABLE, LIBRARY_VARIABLE

ROOT = Path(__file__).parent.parent
TORCH_TESTS = (
    "tests/ops/test_machine.py",
    "tests/ops/test_alignment.py",
    "tests/ops/test_reference_kernels.py",
    "tests/models/test_decoder_bits.py",
    "tests/engine/test_exact_small_model.py",
)
# The rest of the native tests go through every instruction set by themselves (the fixture `instruction_set`).
NATIVE_TESTS = (
    "tests/ops/test_native_kernels.py",
    "tests/models/test_native_decoder.py::test_families_match_the_torch_decoder",
    "tests/models/test_native_decoder.py::test_threads_do_not_change_bits",
    "tests/models/test_native_decoder.py::test_bits_do_not_depend_on_where_weights_and_cache_lie",
)


@dataclass(frozen=True)
class Machine:
    environment: dict[str, str]
    native: str  # the instruction set of our kernels, "none" without them
    torch: str | None  # PyTorch's own; None: this machine's best
    tests: tuple[str, ...]


MACHINES = {
    # MKL and oneDNN have switches of their own; MKL heeds the first on Intel's processors, the second on all.
    "avx2": Machine(
        {
            INSTRUCTION_SET_VARIABLE: "avx2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
        },
        "avx2",
        "AVX2",
        TORCH_TESTS + NATIVE_TESTS,
    ),
    "scalar": Machine(
        {
            INSTRUCTION_SET_VARIABLE: "portable",
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "MKL_CBWR": "COMPATIBLE",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
        },
        "portable",
        "DEFAULT",
        TORCH_TESTS + NATIVE_TESTS,
    ),
    "no compiler": Machine({LIBRARY_VARIABLE: "absent.so"}, "none", None, TORCH_TESTS),
}


@pytest.mark.parametrize("name", MACHINES)
def test_bits_hold_on_another_machine(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    _skip_unless_it_can_be_imitated(machine)
    passed, said = _run(machine, tmp_path / "report.xml")
    assert said["native"] == machine.native
    assert said["torch"] == (machine.torch or torch.backends.cpu.get_cpu_capability())
    for test in machine.tests:
        assert any(case.startswith(test) for case in passed), f"nothing of {test} ran"


def _skip_unless_it_can_be_imitated(machine: Machine) -> None:
    if machine.native == "none":
        return
    before = native.instruction_set()
    try:
        native.select_instruction_set(machine.native)
    except InvalidOptionError as error:
        pytest.skip(str(error))
    native.select_instruction_set(before)


def _run(machine: Machine, report: Path) -> tuple[list[str], dict[str, str]]:
    """The tests that passed, and what the run said of itself. Any failure fails here, with its output."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment = inherited | machine.environment
    options = ["-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
    command = [sys.executable, "-m", "pytest", *options, *machine.tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    passed = [f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}" for case in cases]
    said = {p.attrib["name"]: p.attrib["value"] for case in cases for p in case.iter("property")}
    return passed, said
