"""What the page at / polls: how full the engine is, what was counted so far, and the trees of the latest steps."""

import time
from typing import Any

from paceline.core.step_record import PassRecord
from paceline.core.tokenizer import Tokenizer
from paceline.serve.generate.service import Service
from paceline.serve.http.tenants import Tenant

MAX_DRAWN_NODES = 128


def live(service: Service, tenant: Tenant) -> dict[str, Any]:
    """Figures are of all tenants together; a tree holds text, so it is shown only to the tenant that it belongs to."""
    trees = [record for record in list(service.latest_steps.recent_trees) if tenant.owns(record.cache_salt)]
    load, metrics = service.backend.load(), service.metrics
    return {
        "time_s": time.time(),
        "uptime_s": time.time() - service.begin_s,
        "model": service.config.model_names[0],
        "methods": list(service.backend.methods),
        "draining": service.gate.draining,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "max_running": service.backend.max_num_seqs,
        "capacity": service.gate.capacity,
        "kv_usage": load.kv_usage,
        "prompt_tokens": metrics.prompt_tokens.total(),
        "generation_tokens": metrics.generation_tokens.total(),
        "finished": metrics.finished.total(),
        "ttft_s": {"p50": metrics.ttft.quantile(0.5), "p95": metrics.ttft.quantile(0.95)},
        "inter_token_s": {"p50": metrics.inter_token.quantile(0.5), "p95": metrics.inter_token.quantile(0.95)},
        "speculation": service.backend.speculation_stats(),
        "time_saved_s": {method: saved.seconds for method, saved in list(service.latest_steps.saved.items())},
        "cluster": service.backend.cluster(),
        "trees": [draw(record, service.backend.tokenizer) for record in trees[-1:]],
    }


def draw(record: PassRecord, tokenizer: Tokenizer) -> dict[str, Any]:
    """A verified tree as the page draws it; nodes past the limit are left out, parents always come first."""
    tree = record.draft.cut(MAX_DRAWN_NODES)
    members = tree.members or [(record.method,)] * len(tree)
    accepted = record.accepted[: len(record.new_token_ids)]  # a stop may have cut the path short
    return {
        "request_id": record.request_id,
        "method": record.method,
        "num_nodes": len(record.draft),
        "nodes": [
            {
                "text": tokenizer.token_text(token),
                "parent": parent,
                "members": list(names),
                "accepted": node in accepted,
            }
            for node, (token, parent, names) in enumerate(zip(tree.token_ids, tree.parents, members, strict=True))
        ],
        "then": [tokenizer.token_text(token) for token in record.new_token_ids[len(accepted) :]],
    }
