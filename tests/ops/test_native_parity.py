"""Every instruction set's kernels against a plain C++ twin, bit by bit: also those that this machine does not have.

The twin is the portable code with fused multiply-adds (`PL_FUSED`). ARM's kernels are built with a cross compiler and
run under qemu's user mode, where there are both; AVX-VNNI's in AVX-512's encoding, where the processor knows that one.
"""

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.ops.native.build import ARM_FLAGS, COMMON_FLAGS, SOURCE_DIR, X86_FLAGS, BuildError, find_compiler

PROGRAM = Path(__file__).with_name("native_parity.cpp")
TWIN = """
#include "kernels.h"
extern const Kernels kernels_twin;
#define PL_FUSED
#include "simd_portable.h"
#define TABLE kernels_twin
#define NAME "twin"
#include "kernels.inc"
"""
CHOICE = """
#include <cstdio>
#include "api.h"
int main(int, char** arguments) {
  const char* best = pl_instruction_set();
  printf("%s %d", best, (int)pl_select_instruction_set(arguments[1]));
}
"""
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
EVEX_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512vl", "-mavx512vnni"]
FLAGS = [flag for flag in COMMON_FLAGS if flag != "-O3"] + ["-O1"]  # bits do not depend on it; building does

pytestmark = pytest.mark.slow


def build(
    compiler: list[str], kernels: str, flags: list[str], twin_flags: list[str], folder: Path, *defines: str
) -> Path:
    """The program that compares `kernels` with the twin."""
    (folder / "twin.cpp").write_text(TWIN)
    sources = {
        SOURCE_DIR / f"{kernels}.cpp": flags,
        folder / "twin.cpp": twin_flags,
        SOURCE_DIR / "pack.cpp": [],
        SOURCE_DIR / "pool.cpp": [],
        PROGRAM: [f"-DFAST={kernels}", *defines],
    }
    objects = []
    for source, extra in sources.items():
        objects.append(str(folder / f"{source.stem}.o"))
        run([*compiler, *FLAGS, *extra, f"-I{SOURCE_DIR}", "-c", str(source), "-o", objects[-1]])
    program = folder / "parity"
    run([*compiler, *objects, "-o", str(program), "-lpthread", "-static"])
    return program


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def processor_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else set()


@pytest.fixture
def arm_tools() -> tuple[list[str], list[str]]:
    """(compiler, emulator) for 64-bit ARM; on such a machine its own compiler and no emulator."""
    emulator = [] if platform.machine() == "aarch64" else [ARM_EMULATOR]
    compiler = find_compiler().split() if not emulator else [ARM_COMPILER]
    for tool in (*compiler[:1], *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    return compiler, emulator


@pytest.mark.parametrize(
    ("kernels", "name"), [("kernels_neon", "neon-dotprod"), ("kernels_neon_i8mm", "neon-i8mm")], ids=lambda value: value
)
def test_neon_kernels_have_the_bits_of_their_twin(
    kernels: str, name: str, arm_tools: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    compiler, emulator = arm_tools
    if not emulator and "i8mm" in name and "i8mm" not in processor_flags():
        pytest.skip("this processor lacks i8mm")
    program = build(compiler, kernels, ARM_FLAGS[kernels], [], tmp_path)
    cpu = ["-cpu", "max"] if emulator else []
    assert f"{name}: " in run([*emulator, *cpu, str(program)])


def test_an_arm_machine_runs_the_best_kernels_that_it_has(
    arm_tools: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """The whole library, built for ARM, on processors with i8mm, without it, and without dot products."""
    compiler, emulator = arm_tools
    (tmp_path / "choice.cpp").write_text(CHOICE)
    objects = []
    for source in [*sorted(SOURCE_DIR.glob("*.cpp")), tmp_path / "choice.cpp"]:
        objects.append(str(tmp_path / f"{source.stem}.o"))
        flags = [*FLAGS, "-O0", *ARM_FLAGS.get(source.stem, []), f"-I{SOURCE_DIR}"]
        run([*compiler, *flags, "-c", str(source), "-o", objects[-1]])
    program = str(tmp_path / "choice")
    run([*compiler, *objects, "-o", program, "-lpthread", "-static"])
    if not emulator:
        assert run([program, "portable"]).split()[1] == "0"
        return
    for processor, best, asked, status in [
        ("max", "neon-i8mm", "neon-dotprod", "0"),
        ("max", "neon-i8mm", "neon-i8mm", "0"),
        ("neoverse-n1", "neon-dotprod", "neon-i8mm", "4"),  # `PL_BAD_FORMAT`
        ("neoverse-n1", "neon-dotprod", "portable", "0"),
        ("cortex-a72", "portable", "neon-dotprod", "4"),
    ]:
        assert run([*emulator, "-cpu", processor, program, asked]).split() == [best, status], processor


@pytest.mark.parametrize(
    ("kernels", "flags", "needed"),
    [
        ("kernels_avx2", X86_FLAGS["kernels_avx2"], {"avx2", "fma", "f16c"}),
        ("kernels_avxvnni", X86_FLAGS["kernels_avxvnni"], {"avx2", "fma", "f16c", "avx_vnni"}),
        ("kernels_avxvnni", EVEX_FLAGS, {"avx512vl", "avx512_vnni", "fma", "f16c"}),
    ],
    ids=["avx2", "avx-vnni", "avx-vnni in AVX-512's encoding"],
)
def test_avx_kernels_have_the_bits_of_their_twin(
    kernels: str, flags: list[str], needed: set[str], tmp_path: Path
) -> None:
    if missing := needed - processor_flags():
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    try:
        compiler = find_compiler().split()
    except BuildError as error:
        pytest.skip(str(error))
    assert "checks, 0 differ" in run([str(build(compiler, kernels, flags, ["-mfma"], tmp_path))])


def test_attention_in_integers_has_the_bits_of_its_twin_on_avx512(tmp_path: Path) -> None:
    """And its steps that threads share have the bits of a whole task."""
    if missing := {"avx512bw", "avx512dq", "avx512vl", "avx512_vnni"} - processor_flags():
        pytest.skip(f"this processor lacks {', '.join(sorted(missing))}")
    try:
        compiler = find_compiler().split()
    except BuildError as error:
        pytest.skip(str(error))
    flags, defines = X86_FLAGS["kernels_avx512"], ["-DINTEGER_ATTENTION_ALONE"]
    assert "checks, 0 differ" in run([str(build(compiler, "kernels_avx512", flags, ["-mfma"], tmp_path, *defines))])


def test_what_differs_is_found(tmp_path: Path) -> None:
    """The portable kernels, which do not fuse, against the twin that does."""
    try:
        compiler = find_compiler().split()
    except BuildError as error:
        pytest.skip(str(error))
    program = build(compiler, "kernels_portable", [], [], tmp_path)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "matmul" in done.stdout and "attention" in done.stdout


def test_every_instruction_set_has_its_flags() -> None:
    sources = {path.stem for path in SOURCE_DIR.glob("kernels_*.cpp")}
    assert sources == {*X86_FLAGS, *ARM_FLAGS, "kernels_portable"}, os.listdir(SOURCE_DIR)
