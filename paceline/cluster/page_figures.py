"""What the live page shows of a cluster: its workers, who holds which prefixes, and where requests went and why."""

import statistics
from typing import Any

from paceline.cluster.ingress import Ingress
from paceline.cluster.link import WorkerLink
from paceline.cluster.placer import Placed

NUM_REQUESTS = 12  # newest first
NUM_PREFIXES = 8
SHOWN_ID = 8  # last letters of a request's id: every tenant sees the page, and an id may be used to ask for an answer


def page_figures(ingress: Ingress) -> dict[str, Any]:
    placed = list(ingress.placer.placed)[::-1]
    gaps_s = [one.gap_s for one in ingress.recoveries]
    return {
        "workers": [worker_row(ingress, link) for link in ingress.links],
        "requests": [_request(one) for one in placed[:NUM_REQUESTS]],
        "prefixes": _prefixes(ingress, placed),
        "num_resumed": ingress.num_resumed,
        "recovery_p50_s": statistics.median(gaps_s) if gaps_s else None,
    }


def worker_row(ingress: Ingress, link: WorkerLink) -> dict[str, Any]:
    row: dict[str, Any] = {"worker": link.worker_id, "role": link.hello.get("role"), "up": link.is_up}
    row["why"] = link.last_loss or None
    if not link.is_up:
        return row
    router, figures = ingress.placer.router_of(link), link.figures
    load = router.load(link.worker_id)
    return row | {
        "num_running": load.num_running,
        "num_queued": load.num_queued,
        "queued_tokens": load.queued_tokens,
        "num_blocks": router.num_held(link.worker_id),
        "kv_usage": figures.get("kv_usage", 0.0),
        "num_sent_blocks": figures.get("num_sent_blocks", 0),
        "num_fetched_blocks": figures.get("num_fetched_blocks", 0),
    }


def _request(one: Placed) -> dict[str, Any]:
    return {
        "request_id": one.request_id[-SHOWN_ID:],
        "worker": one.worker_id,
        "attempt": one.attempt,
        "num_cached_blocks": one.num_cached_blocks,
        "prefill_worker": one.prefill_worker_id,
        "num_fetched_blocks": one.num_fetched_blocks,
        "reason": one.reason,
        "at_s": one.at_s,
    }


def _prefixes(ingress: Ingress, placed: list[Placed]) -> list[dict[str, Any]]:
    """Of the latest prompts, each first block once: how many blocks of the newest prompt that begins so who holds."""
    found: dict[int, dict[str, Any]] = {}
    for one in placed:
        if not one.keys:
            continue
        if one.keys[0] in found:
            found[one.keys[0]]["num_requests"] += 1
        elif len(found) < NUM_PREFIXES:
            holders: dict[str, int] = {}
            for router in ingress.routers:
                holders |= router.holders(one.keys)
            row = {"prefix": f"{one.keys[0]:016x}"[:8], "num_blocks": len(one.keys), "num_requests": 1}
            found[one.keys[0]] = row | {"holders": holders}
    return list(found.values())
