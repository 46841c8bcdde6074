"""Every command of the README works with what `make demo` installs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
EXTRA = re.compile(r"paceline\[([\w,]+)\]")

# Importing these is what the verbs do first; `serve` also opens a socket and loads a model, which other tests do.
IMPORTS = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is not installed by make demo")

sys.meta_path.insert(0, Refuse())
import paceline.cli
verbs = [module.name for module in pkgutil.iter_modules(paceline.cli.__path__)]
for verb in verbs:
    importlib.import_module(f"paceline.cli.{verb}")
for module in MODULES:
    importlib.import_module(module)
print(",".join(verbs))
"""
SERVING = ["paceline.serve.http.server", "paceline.serve.http.app", "yaml"]
MEASURING = ["paceline.bench.analyse.report", "paceline.bench.run.url_backend", "paceline.lab.drawing"]
MODULES = [*SERVING, *MEASURING]


def project() -> dict[str, list[str]]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        found: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    return found


def module_names(requirements: list[str]) -> set[str]:
    names = {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in requirements}
    return {{"pyyaml": "yaml"}.get(name, name).replace("-", "_") for name in names} - {"paceline"}


def test_the_readmes_verbs_import_with_what_make_demo_installs() -> None:
    extras = project()
    makefile = (ROOT / "Makefile").read_text()
    match = re.search(r"/\.installed:.*?\$\(INSTALL\) (\S+)", makefile, re.DOTALL)
    assert match is not None
    installed = set(re.findall(r"[\w]+", match[1]))  # of '".[serve,plot,bench]"'
    missing = module_names([r for name, list_ in extras.items() if name not in installed for r in list_])
    missing -= module_names([r for name in installed for r in extras.get(name, [])])
    assert "pytest" in missing, "the test must take something away"
    code = f"BLOCKED = {missing!r}\nMODULES = {MODULES!r}\n{IMPORTS}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    verbs = set(ran.stdout.strip().split(","))
    readme = (ROOT / "README.md").read_text()
    named = {
        verb for row in re.findall(r"^\| (`paceline.*?) \|", readme, re.M) for verb in re.findall(r"\b[a-z]+\b", row)
    }
    assert {"serve", "generate", "verify", "bench"} <= named and named - {"paceline"} <= verbs
