"""The page at / in a real browser: a prompt goes out, coloured tokens and moving figures come back."""

from collections.abc import Iterator

import pytest

from tests.serve import browser, fake
from tests.serve.conftest import Running, running

pytestmark = pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))

SOURCES = "[...document.querySelectorAll('#answer .t')].map(t => t.dataset.source)"
FINISHED = "document.querySelector('#figures').textContent.includes('tokens per pass')"


@pytest.fixture(scope="module")
def page() -> Iterator[tuple[browser.Browser, Running]]:
    with running(fake.FakeBackend(step_s=0.02)) as server, browser.chromium() as chromium:
        chromium.open(server.url)
        yield chromium, server


def tile(name: str) -> str:
    return f"document.querySelector('.tile[data-name={name}] b')?.textContent"


def test_an_answer_streams_in_coloured_by_source(page: tuple[browser.Browser, Running]) -> None:
    chromium, server = page
    chromium.wait_for("document.querySelector('#status').textContent === 'live'")
    before = int(chromium.wait_for(tile("total")))
    chromium.run("document.querySelector('#max-tokens').value = 90; document.querySelector('#send').click()")
    first = len(chromium.wait_for(f"{SOURCES}.length > 3 && {SOURCES}"))
    assert first < 90, "tokens come as they are made, not all at the end"
    chromium.wait_for(FINISHED)
    sources = chromium.run(f"return {SOURCES}")
    assert sources == ["ngram", "ngram", "recovered"] * 30
    colours = chromium.run(
        "return [...document.querySelectorAll('#answer .t')].slice(0, 3).map(t => getComputedStyle(t).backgroundColor)"
    )
    assert colours[0] == colours[1] != colours[2]
    assert server.backend.params[-1].speculative is None
    chromium.wait_for(f"Number({tile('total')}) === {before + 90}")  # the figures moved
    assert chromium.run("return document.querySelector('#legend').textContent").count("drafted by ngram") == 1


def test_the_latest_tree_and_the_acceptance_are_drawn(page: tuple[browser.Browser, Running]) -> None:
    chromium, _ = page
    chromium.wait_for("document.querySelectorAll('#tree g').length === 4")  # three nodes and what the target added
    assert chromium.run("return document.querySelectorAll('#tree g.yes').length") == 3
    assert chromium.run("return document.querySelectorAll('#methods .bars div').length") == 2


def test_decisions_are_shown_with_their_reasons(page: tuple[browser.Browser, Running]) -> None:
    chromium, _ = page
    chromium.wait_for("document.querySelector('#decisions').textContent.includes('2 nodes for 1 request')")
    rows = chromium.run("return [...document.querySelectorAll('#decisions tr')].map(r => r.textContent)")
    assert rows[0] == "drafted: it pays75 %" and "a: on, 0.90 > 0.20" in rows[-1]


def test_speculation_can_be_switched_off(page: tuple[browser.Browser, Running]) -> None:
    chromium, server = page
    chromium.run("document.querySelector('#speculate').click(); document.querySelector('#send').click()")
    chromium.wait_for(FINISHED)
    assert set(chromium.run(f"return {SOURCES}")) == {"target"}
    assert server.backend.params[-1].speculative == {"off": True}
    chromium.run("document.querySelector('#speculate').click(); document.querySelector('#method').value = 'ngram'")
    chromium.run("document.querySelector('#send').click()")
    chromium.wait_for(FINISHED)
    assert server.backend.params[-1].speculative == {"method": "ngram"}


def test_a_schema_goes_with_the_prompt(page: tuple[browser.Browser, Running]) -> None:
    chromium, server = page
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
    chromium.run(f"document.querySelector('#schema').value = '{schema}'; document.querySelector('#send').click()")
    chromium.wait_for(FINISHED)
    held = server.backend.params[-1].structured_outputs
    assert held is not None and held.json == schema
    chromium.run("document.querySelector('#schema').value = '{'; document.querySelector('#send').click()")
    assert "not JSON" in chromium.wait_for("document.querySelector('#answer .error')?.textContent")
    chromium.run("document.querySelector('#schema').value = ''")


def test_stop_ends_the_request(page: tuple[browser.Browser, Running]) -> None:
    chromium, server = page
    num_aborted = len(server.backend.aborted)
    chromium.run("document.querySelector('#max-tokens').value = 3000; document.querySelector('#send').click()")
    chromium.wait_for(f"{SOURCES}.length > 3")
    chromium.run("document.querySelector('#stop').click()")
    chromium.wait_for("document.querySelector('#stop').hidden")
    assert len(server.backend.aborted) == num_aborted + 1


def test_a_refusal_is_shown_in_words(page: tuple[browser.Browser, Running]) -> None:
    chromium, _ = page
    chromium.run("document.querySelector('#max-tokens').value = 99999; document.querySelector('#send').click()")
    assert "ask for at most" in chromium.wait_for("document.querySelector('#answer .error')?.textContent")


def test_nothing_is_loaded_from_elsewhere_and_nothing_fails(page: tuple[browser.Browser, Running]) -> None:
    chromium, server = page
    loaded = chromium.run("return performance.getEntriesByType('resource').map(r => r.name)")
    assert loaded and all(name.startswith((server.url, "data:")) for name in loaded)
    problems = [line for line in chromium.console() if line["level"] == "SEVERE" and "400" not in line["message"]]
    assert not problems
    chromium.open(server.url + "/docs")
    chromium.wait_for("document.querySelectorAll('#routes section').length > 8")
    assert not [line for line in chromium.console() if line["level"] == "SEVERE"]
