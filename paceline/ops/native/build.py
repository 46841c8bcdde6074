"""Compile the native kernels: one shared library with a plain C interface, against nothing but the C++ library.

`setup.py` calls this when the package is installed. In a checkout, or for the sanitizers, call it yourself:

    python -m paceline.ops.native.build
    python -m paceline.ops.native.build --sanitize    # AddressSanitizer and UBSan; prints how to run under it

Imports only the standard library, because it runs before anything is installed.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE_DIR = HERE / "src"

# A multiply and an add are fused only where a kernel says so: a compiler that fuses at will could do so for one row
# count and not for another.
COMMON_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=default", "-Wall", "-Wno-psabi"]
SANITIZE_FLAGS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

# source -> flags of its instruction set; the machine that runs them is asked at run time
X86_FLAGS = {
    "kernels_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma", "-mf16c"],
    "kernels_avxvnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "kernels_avx2": ["-mavx2", "-mfma", "-mf16c"],
}
ARM_FLAGS = {
    "kernels_neon": ["-march=armv8.2-a+dotprod"],
    "kernels_neon_i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
}
# Compilers before GCC 11 and Clang 12 (AVX-VNNI) or GCC 10 and Clang 11 (i8mm) do not know the flag; then the file is
# empty.
NEWER = {"kernels_avxvnni", "kernels_neon_i8mm"}


class BuildError(Exception):
    """The kernels could not be compiled; the message says why."""


def find_compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    raise BuildError("no C++ compiler found (tried $CXX, c++, g++, clang++)")


def library_path(directory: Path = HERE) -> Path:
    return directory / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX') or '.so'}"


def build(output: Path, *, sanitize: bool = False) -> Path:
    """Compile everything into `output`."""
    compiler = find_compiler().split()
    flags = COMMON_FLAGS + (SANITIZE_FLAGS if sanitize else [])
    flags_of = {"x86_64": X86_FLAGS, "amd64": X86_FLAGS, "aarch64": ARM_FLAGS, "arm64": ARM_FLAGS}
    own_flags = flags_of.get(platform.machine().lower(), {})
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:

        def compile_one(source: Path) -> str:
            target = Path(temporary) / f"{source.stem}.o"
            extra = own_flags.get(source.stem, [])
            try:
                _run([*compiler, *flags, *extra, "-c", str(source), "-o", str(target)])
            except BuildError:
                if source.stem not in NEWER:
                    raise
                _run([*compiler, *flags, "-c", str(source), "-o", str(target)])
            return str(target)

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sorted(SOURCE_DIR.glob("*.cpp"))))
        linked = Path(temporary) / "linked.so"
        link_flags = SANITIZE_FLAGS if sanitize else []
        _run([*compiler, "-shared", *link_flags, *objects, "-o", str(linked), "-lpthread"])
        # Written beside and renamed: a running process keeps the file it has open.
        beside = output.with_suffix(".new")
        shutil.copyfile(linked, beside)
        beside.replace(output)
    return output


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stderr[-2000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan, into build/sanitize")
    args = parser.parse_args()
    if not args.sanitize:
        print(build(library_path()))
        return
    path = build(Path("build/sanitize") / "_kernels.so", sanitize=True)
    compiler = find_compiler().split()
    runtimes = [
        subprocess.run(
            [*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    print(
        f"LD_PRELOAD={':'.join(runtimes)} ASAN_OPTIONS=detect_leaks=0 PACELINE_NATIVE_LIBRARY={path.resolve()} "
        "python -m pytest tests/ops/test_native_kernels.py tests/ops/test_native_rows.py "
        "tests/ops/test_native_noise.py tests/spec/lookup/test_native_suffix.py tests/models/test_native_decoder.py "
        "tests/models/test_native_long_context.py tests/ops/test_native_team.py tests/models/test_native_kv_bytes.py "
        "tests/models/test_native_kv_shorts.py"
    )


if __name__ == "__main__":
    main()
