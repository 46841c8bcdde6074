"""A route of vLLM's or OpenAI's that is not here says so, with what to use instead."""

import httpx
import pytest

from paceline.serve.config import ServerConfig
from paceline.serve.http.absent_routes import ABSENT_AREAS, ABSENT_ROUTES
from paceline.serve.http.app import create_app
from tests.from_vllm_page import ROUTES
from tests.serve import fake


@pytest.mark.parametrize("path", ABSENT_ROUTES)
def test_an_absent_route_is_refused_with_the_reason(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"messages": [[{"role": "user", "content": "Hi"}]]})
    assert answer.status_code == 404, "a status that clients do not try again"
    error = answer.json()["error"]
    assert error["type"] == "not_found_error" and error["code"] == "route_not_supported"
    assert error["message"] == f"this server has no {path}: {ABSENT_ROUTES[path]}"


@pytest.mark.parametrize("path", ABSENT_AREAS)
def test_an_absent_part_of_openais_api_is_refused_with_all_below_it(http: httpx.Client, path: str) -> None:
    for answer in (http.post(path, json={}), http.post(f"{path}/some/thing"), http.delete(f"{path}/some/thing")):
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "route_not_supported"
        assert error["message"] == f"this server has no {path}: {ABSENT_AREAS[path]}"


def test_absent_routes_are_refused_for_get_too_and_stay_out_of_the_description(http: httpx.Client) -> None:
    assert http.get("/ping").json()["error"]["code"] == "route_not_supported"
    assert not set(ABSENT_ROUTES) & set(http.get("/openapi.json").json()["paths"])


def test_routes_that_are_called_the_same_exist_and_are_not_called_absent() -> None:
    app = create_app(fake.FakeBackend(), ServerConfig(("fake",)))
    here = {getattr(route, "path", "") for route in app.routes}
    assert set(ROUTES) <= here
    assert not set(ROUTES) & (set(ABSENT_ROUTES) | set(ABSENT_AREAS))


def test_routes_that_reasons_point_to_exist(http: httpx.Client) -> None:
    reasons = [*ABSENT_ROUTES.values(), *ABSENT_AREAS.values()]
    named = {word.strip(",:") for reason in reasons for word in reason.split() if word.startswith("/")}
    assert named and named <= set(ROUTES)
