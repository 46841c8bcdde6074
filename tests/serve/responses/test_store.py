"""The store of responses: bounded in number and size for each tenant, least recently used first."""

import pytest

from paceline.serve.http.errors import ApiError
from paceline.serve.http.message_bodies import Message
from paceline.serve.responses.store import ResponseStore


def body(name: str) -> dict[str, str]:
    return {"id": name}


def said(text: str) -> list[Message]:
    return [Message(role="user", content=text)]


def test_the_one_not_used_for_longest_is_forgotten() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1 << 20)
    store.put("t", body("a"), said("1"))
    store.put("t", body("b"), said("2"))
    assert store.find("t", "a").messages == tuple(said("1"))
    store.put("t", body("c"), said("3"))
    assert store.get("t", "b") is None and store.get("t", "a") is not None
    store.put("u", body("a"), said("other"))
    assert store.find("t", "a").messages != store.find("u", "a").messages


def test_a_long_conversation_takes_the_place_of_many() -> None:
    store = ResponseStore(max_responses=100, max_bytes=100_000)
    for i in range(10):
        store.put("t", body(str(i)), said("x" * 1000))
    assert store.get("t", "0") is not None
    store.put("t", body("long"), said("x" * 20_000))
    assert store.get("t", "long") is not None and store.get("t", "1") is None
    store.put("t", body("longer"), said("x" * 30_000))
    assert store.get("t", "longer") is None, "what alone is above the limit is not kept"


def test_what_is_deleted_is_gone() -> None:
    store = ResponseStore(10, 1 << 20)
    store.put("t", body("a"), said("1"))
    with pytest.raises(ApiError, match="no stored response"):
        store.delete("u", "a")
    store.delete("t", "a")
    assert store.get("t", "a") is None


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = ResponseStore(0, 0)
    store.put("t", body("a"), said("1"))
    assert store.get("t", "a") is None
