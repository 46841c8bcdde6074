"""Polls are cheap: one rendering answers all that come within a moment, and no reader gets another's."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from paceline.serve.http import app
from paceline.serve.http.tenants import Tenant
from paceline.serve.observe import polled
from paceline.serve.observe.exposition import Exposition
from paceline.serve.observe.polled import RENDER_EVERY_S, Polled
from tests.serve import fake
from tests.serve.conftest import Running, running

ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands still unless `now_s` is moved."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(polled, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


@pytest.fixture
def server() -> Iterator[Running]:
    with running(fake.FakeBackend(), api_keys=(ALICE, BOB), admin_keys=(ADMIN,)) as handle:
        yield handle


def client(server: Running, key: str) -> httpx.Client:
    return server.client(headers={"Authorization": f"Bearer {key}"})


def test_polls_in_quick_succession_are_rendered_once(
    server: Running, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[str] = []
    live, render = app.live, Exposition.render

    def counted_live(service: Any, tenant: Tenant) -> dict[str, Any]:
        rendered.append("/api/live")
        return live(service, tenant)

    def counted_render(exposition: Exposition) -> bytes:
        rendered.append("/metrics")
        return render(exposition)

    monkeypatch.setattr(app, "live", counted_live)
    monkeypatch.setattr(Exposition, "render", counted_render)
    for path in ("/api/live", "/metrics"):
        with client(server, ALICE) as http:
            bodies = {http.get(path).raise_for_status().content for _ in range(30)}
            assert len(bodies) == 1 and rendered.count(path) == 1
            clock.now_s += 0.99 * RENDER_EVERY_S
            http.get(path)
            assert rendered.count(path) == 1
            clock.now_s += 0.02 * RENDER_EVERY_S
            http.get(path)
            assert rendered.count(path) == 2


def test_figures_are_new_again_after_a_moment(server: Running, clock: SimpleNamespace) -> None:
    with client(server, ALICE) as http:
        before = http.get("/api/live").json()["generation_tokens"]
        http.post("/v1/completions", json={"prompt": "x", "max_tokens": 5}).raise_for_status()
        assert http.get("/api/live").json()["generation_tokens"] == before
        clock.now_s += 1.01 * RENDER_EVERY_S
        assert http.get("/api/live").json()["generation_tokens"] == before + 5


def trees(server: Running, key: str) -> list[Any]:
    with client(server, key) as http:
        found: list[Any] = http.get("/api/live").raise_for_status().json()["trees"]
        return found


@pytest.mark.parametrize("order", [(ALICE, BOB, ADMIN), (ADMIN, BOB, ALICE), (BOB, ALICE, ADMIN)])
def test_tenants_never_see_what_was_rendered_for_another(
    server: Running, clock: SimpleNamespace, order: tuple[str, ...]
) -> None:
    """All within one moment of a clock that stands still."""
    with client(server, ALICE) as http:
        http.post("/v1/completions", json={"prompt": "secret", "max_tokens": 8}).raise_for_status()
    for _ in range(3):
        shown = {key: trees(server, key) for key in order}
        assert shown[ALICE] and shown[ADMIN] and shown[BOB] == []
    with client(server, "wrong-key") as http:
        assert http.get("/api/live").status_code == 401


def test_a_rendering_that_fails_is_not_remembered(clock: SimpleNamespace) -> None:
    answers: list[Any] = [ZeroDivisionError(), b"fine"]

    def render(reader: None) -> bytes:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    body = Polled[None](render)
    with pytest.raises(ZeroDivisionError):
        body.body(None)
    assert body.body(None) == body.body(None) == b"fine"
