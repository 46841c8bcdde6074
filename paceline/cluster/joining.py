"""Whether a worker may join: it must give the same answers, bit for bit, as those that are there."""

from collections.abc import Mapping
from typing import Any

ROLES = ("prefill", "decode", "mixed")


def why_not(hello: Mapping[str, Any], fingerprint: Mapping[str, str]) -> str | None:
    """Why a worker that says this of itself is refused; None: it may join. `fingerprint`: of the others."""
    if hello["role"] not in ROLES:
        return f"there is no role {hello['role']!r}: choose one of {', '.join(ROLES)}"
    theirs = hello["fingerprint"]
    if theirs == fingerprint:
        return None
    parts = [name for name in sorted(set(theirs) | set(fingerprint)) if theirs.get(name) != fingerprint.get(name)]
    shown = ", ".join(
        f"{name} ({_short(theirs.get(name))} instead of {_short(fingerprint.get(name))})" for name in parts
    )
    return f"its answers would differ: another {shown}. Start it with the cluster's model and kernels"


def _short(value: str | None) -> str:
    text = "none" if value is None else value
    return text if len(text) <= 24 else text[:21] + "..."
