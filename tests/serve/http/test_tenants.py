"""Several keys are several tenants: what one sends, is answered, or caches does not affect another."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.errors import InvalidOptionError
from paceline.serve.config import ServerConfig
from paceline.serve.http.tenants import Keys, Tenant
from tests.serve import fake
from tests.serve.conftest import Running, running

ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"


@pytest.fixture(scope="module")
def shared() -> Iterator[Running]:
    with running(fake.FakeBackend(), api_keys=(ALICE, BOB), admin_keys=(ADMIN,)) as handle:
        yield handle


def client(server: Running, key: str) -> httpx.Client:
    return server.client(headers={"Authorization": f"Bearer {key}"})


def complete(server: Running, key: str, **body: Any) -> str:
    """The salt that the engine was given."""
    with client(server, key) as http:
        http.post("/v1/completions", json={"prompt": "secret words", "max_tokens": 8} | body).raise_for_status()
    return server.backend.salts[-1]


def test_each_key_has_a_salt_of_its_own_and_requests_may_bring_another(shared: Running) -> None:
    alice, bob = complete(shared, ALICE), complete(shared, BOB)
    assert alice and bob and alice != bob
    assert complete(shared, ALICE) == alice
    own = complete(shared, ALICE, cache_salt="mine")
    assert own not in (alice, bob, "mine")
    assert complete(shared, BOB, cache_salt="mine") != own
    assert all(key not in salt for key in (ALICE, BOB) for salt in shared.backend.salts)


def test_no_client_can_name_the_salt_of_another(shared: Running) -> None:
    alice = complete(shared, ALICE)
    for guess in (alice, f"{alice}\x1fmine", "\x1f"):
        assert complete(shared, BOB, cache_salt=guess).split("\x1f")[0] == complete(shared, BOB)


@pytest.mark.parametrize("keys", [(), (ALICE,)])
def test_with_one_key_or_none_all_clients_share(keys: tuple[str, ...]) -> None:
    with running(fake.FakeBackend(), api_keys=keys) as handle:
        assert complete(handle, ALICE) == ""
        assert complete(handle, ALICE, cache_salt="mine") == "\x1fmine"


def trees(server: Running, key: str) -> list[Any]:
    with client(server, key) as http:
        answer: dict[str, Any] = http.get("/api/live").raise_for_status().json()
        assert answer["generation_tokens"] > 0  # figures are of all tenants together
        found: list[Any] = answer["trees"]
        return found


def test_the_live_page_shows_text_to_its_owner_and_to_admins(shared: Running) -> None:
    for salt in (None, "mine"):
        shared.service.latest_steps.recent_trees.clear()
        complete(shared, ALICE, cache_salt=salt)
        assert trees(shared, ALICE) and trees(shared, ADMIN)
        assert trees(shared, BOB) == []


def test_an_admin_key_opens_every_route(shared: Running) -> None:
    with client(shared, ADMIN) as http:
        assert http.get("/v1/models").status_code == 200
        assert http.get("/metrics").status_code == 200


def test_a_tenant_owns_its_own_salts_only() -> None:
    tenant = Tenant("abc", sees_all=False)
    assert tenant.owns("abc") and tenant.owns(tenant.cache_salt("x"))
    assert not tenant.owns("abcd") and not tenant.owns("") and not tenant.owns("ab\x1fc")


def test_keys_give_their_tenants_in_order() -> None:
    keys = Keys((ALICE, BOB), (ADMIN,))

    def tenant(key: str) -> Tenant:
        headers = [(b"authorization", f"Bearer {key}".encode())]
        return keys.tenant({"path": "/metrics", "method": "GET", "headers": headers})

    assert len({tenant(key).id for key in (ALICE, BOB, ADMIN)}) == 3
    assert [tenant(key).sees_all for key in (ALICE, BOB, ADMIN)] == [False, False, True]


def test_admin_keys_need_api_keys() -> None:
    with pytest.raises(InvalidOptionError, match="admin_keys"):
        ServerConfig(("x",), admin_keys=("a",))
