"""Answers that `previous_response_id` may name: the latest ones of each tenant, within a number and a size.

A stored answer holds its whole conversation, so it does not depend on whether those before it are still there.
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.serve.http.errors import ApiError
from paceline.serve.http.message_bodies import Message, as_text

BYTES_PER_MESSAGE = 512  # of the objects around a message's text


@dataclass(frozen=True, slots=True)
class Stored:
    body: dict[str, Any]
    messages: tuple[Message, ...]  # the conversation with this answer, without instructions
    num_bytes: int


class ResponseStore:
    def __init__(self, max_responses: int, max_bytes: int) -> None:
        """Limits are for each tenant; the number of tenants is the number of API keys."""
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[str, Stored]] = {}

    def put(self, tenant_id: str, body: dict[str, Any], messages: Sequence[Message]) -> None:
        kept = self._tenants.setdefault(tenant_id, OrderedDict())
        kept[body["id"]] = Stored(body, tuple(messages), _num_bytes(body, messages))
        while len(kept) > self._max_responses or sum(stored.num_bytes for stored in kept.values()) > self._max_bytes:
            kept.popitem(last=False)  # the one that was not used for longest

    def get(self, tenant_id: str, response_id: str) -> Stored | None:
        kept = self._tenants.get(tenant_id)
        if kept is None or response_id not in kept:
            return None
        kept.move_to_end(response_id)
        return kept[response_id]

    def find(self, tenant_id: str, response_id: str) -> Stored:
        stored = self.get(tenant_id, response_id)
        if stored is None:
            raise ApiError(404, f"there is no stored response {response_id!r:.80}", code="response_not_found")
        return stored

    def delete(self, tenant_id: str, response_id: str) -> None:
        self.find(tenant_id, response_id)
        del self._tenants[tenant_id][response_id]


def _num_bytes(body: dict[str, Any], messages: Sequence[Message]) -> int:
    texts = sum(
        len(as_text(message.content)) + sum(len(call.function.arguments) for call in message.tool_calls or ())
        for message in messages
    )
    return len(json.dumps(body)) + 4 * texts + BYTES_PER_MESSAGE * len(messages)  # a character takes up to 4 bytes
