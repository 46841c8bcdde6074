"""docs/auto.md names the files and constants that there are, and all of the controller's."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "paceline" / "spec" / "auto"
PAGE = (ROOT / "docs" / "auto.md").read_text(encoding="utf-8")
# Not choices: texts, empty values and what follows from other constants.
NOT_CHOICES = {
    *("ASKED", "DECISIONS", "CANNOT_BUILD", "KEPT"),
}
MOST_LINES, MOST_CONSTANTS = 883, 12


def constants() -> set[str]:
    found: set[str] = set()
    for file in FOLDER.glob("*.py"):
        for names in re.findall(r"^((?:[A-Z][A-Z0-9_]+(?:: [^=\n]+)?,? ?)+)= ", file.read_text(), flags=re.MULTILINE):
            found |= set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", names.partition(":")[0]))
        for names in re.findall(r"^([A-Z][A-Z0-9_, ]+) = \(\n", file.read_text(), flags=re.MULTILINE):
            found |= set(names.replace(" ", "").split(","))
    return found


def test_the_page_has_every_constant_and_no_other() -> None:
    table = PAGE.partition("## The constants")[2].partition("## ")[0]
    named = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", table))
    assert named == constants() - NOT_CHOICES
    assert set(re.findall(r"`([A-Z][A-Z0-9]*_[A-Z0-9_]+)`", PAGE)) <= named


def test_the_page_names_every_file_of_the_controller() -> None:
    parts = set(
        re.findall(r"^\| `(\S+\.py)`", PAGE.partition("## The parts")[2].partition("**An account")[0], re.MULTILINE)
    )
    assert {f"spec/auto/{file.name}" for file in FOLDER.glob("*.py") if file.name != "__init__.py"} <= parts
    assert all((ROOT / "paceline" / part).is_file() for part in parts)


def test_the_controller_stays_small() -> None:
    assert sum(len(file.read_text().splitlines()) for file in FOLDER.glob("*.py")) <= MOST_LINES
    assert len(constants() - NOT_CHOICES) <= MOST_CONSTANTS
