"""The introductory notebook runs from top to bottom, cell by cell, and prints what its text says."""

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent.parent / "examples" / "economics.ipynb"


def test_every_cell_of_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        exec(compile(source, f"{NOTEBOOK.name}, code cell {number}", "exec"), names)
        assert cell["outputs"] == [] and cell["execution_count"] is None, "stored outputs go stale: clear them"
    shown = capsys.readouterr().out
    assert "0.8 [2.95, 3.69, 4.16]" in shown
    assert "idle machine, acceptance 0.8: K =" in shown
    assert "busy machine, acceptance 0.4: turn it off" in shown
    assert names["picture"].startswith("<svg")
