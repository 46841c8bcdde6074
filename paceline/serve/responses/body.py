"""The body of a response at any moment of its life: what was asked for, and what is there of the answer."""

import time
from collections.abc import Sequence
from typing import Any

from paceline.serve.generate.call import Call
from paceline.serve.generate.deltas import Cursor
from paceline.serve.generate.figures import usage
from paceline.serve.responses.output import COMPLETED, INCOMPLETE, Item
from paceline.serve.responses.request import NamedFunction, ResponsesRequest


def response_body(
    call: Call,
    asked: ResponsesRequest,
    status: str,
    items: Sequence[Item] = (),
    cursors: Sequence[Cursor] = (),
    error: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """`cursors`: of a finished answer, whose tokens are counted."""
    ended = status in (COMPLETED, INCOMPLETE)
    return {
        "id": call.id,
        "object": "response",
        "created_at": call.created,
        "completed_at": int(time.time()) if status == COMPLETED else None,
        "status": status,
        "error": error,
        "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
        "model": call.model,
        "output": list(items),
        "usage": _usage(call, cursors) if ended else None,
        **_asked(asked),
    }


def _asked(asked: ResponsesRequest) -> dict[str, Any]:
    """The request's own options come back, with the defaults of those that were left out."""
    named = isinstance(asked.tool_choice, NamedFunction)
    form = None if asked.text is None else asked.text.format
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": None,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": "default",
        "store": asked.store is not False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": asked.tool_choice.model_dump() if named else asked.tool_choice or "auto",  # type: ignore[union-attr]
        "tools": [tool.model_dump() for tool in asked.tools or ()],
        "top_logprobs": 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }


def _usage(call: Call, cursors: Sequence[Cursor]) -> dict[str, Any]:
    counts = usage(call, cursors)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
