"""An alias like the real ones, but tiny: a wheel with a small GGUF file in it, and a folder that pip finds it in.

Run as a script it fetches that alias, slowly, so that a test can watch, interrupt or kill it:
    python tiny_alias.py WHEEL_FOLDER SECONDS
"""

import dataclasses
import hashlib
import sys
import time
import zipfile
from pathlib import Path

from paceline.models.alias_wheels import Wheel, numbered_wheels
from paceline.models.aliases import Alias

MEMBER = "tiny_model/tiny.gguf"
FILES = {
    "tiny_model-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
    "tiny_model-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": "",
}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel_path(folder: Path, part: str = "") -> Path:
    return folder / f"tiny_model{part and f'_part{part}'}-1.0-py3-none-any.whl"


def split_wheels(folder: Path, count: int) -> Alias:
    """The GGUF file of `make_wheel` again, in several wheels, and not widened."""
    whole = (folder / "tiny.gguf").read_bytes()
    size = -(-len(whole) // count)
    rows = []
    for number in range(1, count + 1):
        part, path = whole[(number - 1) * size : number * size], wheel_path(folder, str(number))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"tiny_model_part{number}/data/part{number:02}.bin", part)
        rows.append((sha256(path), path.stat().st_size, len(part)))
    wheels = numbered_wheels("tiny-model", "1.0", tuple(rows))
    return dataclasses.replace(tiny_alias(folder), wheels=wheels, widened=False)


def make_wheel(folder: Path) -> Alias:
    """Write the GGUF file and the wheel into `folder`, and describe them."""
    from tests.models.small_gguf import write_model
    from tests.models.small_models import hf_model

    write_model(folder / "tiny.gguf", hf_model("llama"))
    with zipfile.ZipFile(wheel_path(folder), "w") as archive:
        archive.write(folder / "tiny.gguf", MEMBER)
        for name, content in FILES.items():
            archive.writestr(name, content)
    return tiny_alias(folder)


def tiny_alias(folder: Path) -> Alias:
    wheel = wheel_path(folder)
    return Alias(
        name="tiny",
        description="a test",
        wheels=(
            Wheel(
                requirement="tiny-model==1.0",
                sha256=sha256(wheel),
                num_bytes=wheel.stat().st_size,
                member=MEMBER,
                member_bytes=(folder / "tiny.gguf").stat().st_size,
            ),
        ),
        sha256=sha256(folder / "tiny.gguf"),
        disk_bytes=1_000_000,
    )


def fetch_slowly(folder: Path, seconds: float) -> None:
    from paceline.models import fetch

    convert = fetch.convert_gguf

    def slow_convert(source: Path, target: Path, *, widen: bool) -> None:
        (target / "model.safetensors").write_bytes(b"half a file")
        print("converting", flush=True)
        time.sleep(seconds)
        convert(source, target, widen=widen)

    fetch.convert_gguf = slow_convert  # type: ignore[attr-defined]
    print(fetch.fetch_alias(tiny_alias(folder)), flush=True)


if __name__ == "__main__":
    fetch_slowly(Path(sys.argv[1]), float(sys.argv[2]))
