"""docs/architecture.md is true: its map names every folder, its walks go through files that exist, each once."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
WITHOUT_A_LINE = {"drafters", "serve", "bench", "serve/http/static"}
WITHOUT_A_LINE |= {"models/drafters", "ops/native", "ops/triton"}  # in the line of their parent


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def folders() -> set[str]:
    package = ROOT / "paceline"
    found = {str(path.parent.relative_to(package)) for path in package.rglob("*.py")} - {"."}
    return found - WITHOUT_A_LINE - {name for name in found if name.startswith(("drafters/", "bench/workloads/"))}


def test_the_map_has_one_line_for_every_folder() -> None:
    named = re.findall(r"^\| `([\w/]+)/` \|", section("The map"), flags=re.M)
    assert len(named) == len(set(named))
    assert set(named) == folders()


def test_the_walks_go_through_files_that_exist_and_through_none_twice() -> None:
    walks = re.split(r"\nA ", section("Two walks"))[1:]
    assert len(walks) == 2
    for walk in walks:
        files = re.findall(r"^\d+\. `([\w/]+\.py)`", walk, flags=re.M)
        assert len(files) > 10 and len(files) == len(set(files))
        missing = [name for name in files if not (ROOT / "paceline" / name).exists()]
        assert not missing


def test_files_named_on_the_page_exist() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[\w]+\.py)`", PAGE))
    missing = [name for name in named if not (ROOT / "paceline" / name).exists() and not (ROOT / name).exists()]
    assert not missing
