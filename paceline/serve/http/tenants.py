"""Which tenant a client is, by its API key; it learns nothing of other tenants.

Where several keys are set, each is a tenant. Tenants share the model and its time, but neither cached prefixes nor past
outputs (drafters learn from those), and the live page shows a tenant its own text only. With one key, or none, there is
one tenant. An admin key is a tenant like any other, and sees the text of all on the live page.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Scope

from paceline.serve.http.errors import ApiError

TENANT = "paceline.tenant"  # key of the ASGI scope

# Health checks, the page itself and the API's description hold nothing worth a key.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/docs", "/openapi.json"})
OPEN_PREFIX = "/static/"
SEPARATOR = "\N{UNIT SEPARATOR}"  # between tenant and the request's own salt


@dataclass(frozen=True, slots=True)
class Tenant:
    id: str = ""  # part of the cache salt; never shown, never logged
    sees_all: bool = True  # on the live page

    def cache_salt(self, given: str | None) -> str:
        """The engine's salt for a request of this tenant that brings a salt of its own, or none."""
        return f"{self.id}{SEPARATOR}{given}" if given else self.id

    def owns(self, cache_salt: str) -> bool:
        return self.sees_all or cache_salt.split(SEPARATOR)[0] == self.id


class Keys:
    """Compares in constant time: every key is compared in full, whatever the answer."""

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in (*keys, *admin_keys)]
        one = len(self._digests) == 1
        # Digests under another prefix than the ones that are compared, so that a salt tells nothing about its key.
        ids = ["" if one else hashlib.sha256(b"tenant " + digest).hexdigest()[:16] for digest in self._digests]
        self._tenants = [Tenant(id, one or i >= len(keys)) for i, id in enumerate(ids)]

    def tenant(self, scope: Scope) -> Tenant:
        """The client's tenant; raises for a route that needs a key where none, or a wrong one, was given."""
        path = scope["path"]
        if not self._digests or path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or scope["method"] == "OPTIONS":
            return Tenant()
        given = hashlib.sha256(_bearer(scope)).digest()
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return self._tenants[matches.index(True)]


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = bytes(value).partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else b""
    return b""
