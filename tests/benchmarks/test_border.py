"""The border between `paceline/bench/` (the product) and `benchmarks/` (our own claims)."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in names}


def test_the_package_imports_no_benchmark_script() -> None:
    found = {path.name: imported(path) & (SCRIPTS | {"benchmarks"}) for path in (ROOT / "paceline").rglob("*.py")}
    assert {name: scripts for name, scripts in found.items() if scripts} == {}


def test_every_benchmark_script_has_its_place_in_the_readme() -> None:
    page = (ROOT / "benchmarks" / "README.md").read_text()
    named = {name.removesuffix(".py") for name in re.findall(r"`(\w+\.py)`", page)}
    parts = {script for script in SCRIPTS if script.startswith("hostile_")}  # `hostile_*.py`
    assert named == SCRIPTS - parts and "`hostile_*.py`" in page
