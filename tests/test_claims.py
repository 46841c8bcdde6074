"""What the documents claim can be looked up: commands exist, links lead somewhere, lists are those of the code."""

import re
from pathlib import Path

import pytest

from paceline.cli.main import VERBS
from paceline.models.gguf_names import QUANTIZED_TYPES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "LLM_SERVING.md", *sorted((ROOT / "docs").glob("*.md"))]


def tables(text: str) -> list[list[list[str]]]:
    """Each table as rows of cells, its heading first and without the line under it."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            if not inside:
                found.append([])
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                found[-1].append(cells)
        inside = line.lstrip().startswith("|")
    return found


def table_under(page: str, heading: str, first_cell: str) -> list[list[str]]:
    """Rows of the table under a heading whose first column is called that."""
    _, _, after = (ROOT / page).read_text().partition(f"\n## {heading}\n")
    section = after.partition("\n## ")[0]
    (table,) = [table for table in tables(section) if table[0][0] == first_cell]
    return table


def exists(command: str) -> bool:
    """`benchmarks/FILE`, `paceline VERB ...`, or a link to a page."""
    link = re.fullmatch(r"\[.*\]\(([^)#]+)(#.*)?\)", command)
    if link:
        return (ROOT / link[1]).is_file()
    words = command.strip("`").removeprefix("python ").split()
    if words[0] == "paceline":
        return len(words) > 1 and words[1] in VERBS
    return words[0].startswith("benchmarks/") and (ROOT / words[0]).is_file()


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("`benchmarks/cpu.py`", True),
        ("`benchmarks/gone.py`", False),
        ("`paceline bench never-slower --quick`", True),
        ("`paceline boast`", False),
        ("[docs/kernels.md](docs/kernels.md#what-is-promised)", True),
        ("[docs/gone.md](docs/gone.md)", False),
        ("by hand", False),
    ],
)
def test_a_command_that_does_not_exist_is_distinguished_from_one_that_does(command: str, found: bool) -> None:
    assert exists(command) == found


def test_every_measured_figure_names_its_scope_and_a_command_that_exists() -> None:
    heading, *rows = table_under("README.md", "Measured", "what")
    assert heading == ["what", "figure", "scope", "command"] and len(rows) >= 10
    assert not [row for row in rows if len(row) != 4 or not row[2] or not exists(row[3])]


def test_the_limits_list_the_fields_that_the_server_refuses() -> None:
    schemas = pytest.importorskip("paceline.serve.http.request_bodies")
    _, *rows = table_under("docs/limits.md", "The server's API", "field")
    assert [row[0].strip("`") for row in rows] == list(schemas.UNSUPPORTED)


@pytest.mark.parametrize("page", ["README.md", "docs/limits.md"])
def test_the_blocks_that_are_read_are_named(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert ", ".join(QUANTIZED_TYPES) in text


def test_the_readme_links_its_limits() -> None:
    assert "(docs/limits.md)" in (ROOT / "README.md").read_text().partition("\n## Limits\n")[2]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links {target}#{anchor}"
