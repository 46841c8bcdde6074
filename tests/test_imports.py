"""The import table of docs/architecture.md, held by a test: which folder may import which."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "paceline"

# folder or top-level file -> what it may import from paceline (besides itself and errors)
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "inputs": set(),
    "sampling_params": {"core"},
    "outputs": {"core"},
    "core": set(),
    "ops": {"core"},
    "models": {"core", "ops"},
    "kv": {"core", "ops"},
    "verifiers": {"core", "ops"},
    "spec": {"core", "ops", "models", "verifiers", "lab"},
    "structured": {"core"},
    "engine": {"core", "ops", "models", "kv", "verifiers", "spec", "structured"},
    "llm": {"core", "models", "spec", "engine"},
    "lab": set(),
    "train": {"core", "ops", "models"},
    "drafters": set(),
    "serve": {"llm", "core", "lab"},
    "cluster": {"llm", "core", "lab", "kv", "serve", "engine"},  # of the engine only its account of rows, see below
    "verify": {"llm", "core", "ops", "models", "verifiers", "spec", "structured"},
    "bench": {"llm", "core", "lab", "spec"},
    "vllm_proposer": {"core", "spec"},
}
ANYTHING = {"cli", "__init__", "__main__"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            pieces = name.split(".")
            if pieces[0] == "paceline" and len(pieces) > 1:
                parts.add(pieces[1])
    return parts


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_follow_the_table(path: Path) -> None:
    part = part_of(path)
    if part in ANYTHING:
        return
    assert part in ALLOWED, f"paceline/{part} has no row in the import table"
    strangers = imported_parts(path) - ALLOWED[part] - {part, "errors", "__version__"}
    assert not strangers, f"{path.name} imports paceline.{sorted(strangers)}, which paceline/{part} may not"


@pytest.mark.parametrize("path", sorted((PACKAGE / "serve").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_server_reads_no_attribute_of_the_engine(path: Path) -> None:
    """What it needs to know are methods of `AsyncLLM`; an attribute named so would lead past them."""
    attributes = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not attributes & {"engine", "core", "scheduler", "speculator"}


# What decides (routes, policies, the simulator, the wire) needs neither an engine nor a server, and no library of the
# extra: only these few files may know them.
CLUSTER_ABOVE_LLM = {
    "engine_seam.py",
    "worker.py",
    "worker_main.py",
    "backend.py",
    "local.py",
    "app.py",
    "zmq_events.py",
}


@pytest.mark.parametrize("path", sorted((PACKAGE / "cluster").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_decides_in_a_cluster_knows_no_engine(path: Path) -> None:
    if path.name in CLUSTER_ABOVE_LLM and path.parent.name == "cluster":
        assert "engine" not in imported_parts(path)
        return
    pure = {"prompt_keys.py": {"kv"}, "simulate/worker.py": {"engine"}}  # kv/hashes.py, engine/row_cost.py
    name = path.relative_to(PACKAGE / "cluster").as_posix()
    assert not imported_parts(path) & {"llm", "kv", "serve", "engine"} - pure.get(name, set())
    assert not any(name in path.read_text() for name in ("import torch", "import ray", "import zmq"))
