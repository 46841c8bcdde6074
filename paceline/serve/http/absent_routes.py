"""Routes of vLLM and OpenAI that are not here: whoever calls one is told what is missing and what to use instead.

The answer is 404 and not 501, because clients repeat a request that got a status from 500 on. `ABSENT_ROUTES` are those
of vLLM 0.32, which `docs/from-vllm.md` shows; `ABSENT_AREAS` are parts of OpenAI's API, with all routes below them.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from paceline.core.foreign_options import NO_LORA, NOT_POOLING, ONE_DEVICE, TEXT_ONLY
from paceline.serve.http.errors import ApiError

MESSAGES = "use /v1/chat/completions or /v1/responses"
RENDER = "/tokenize with messages or a prompt gives the tokens that the model would see"
DERENDER = "/detokenize makes text of tokens"
TOKENS = "use /v1/completions with a list of token ids as prompt; return_token_sources has the ids of the answer"
MEMORY = "the engine keeps its memory while it runs: stop the server to free it"
PAUSE = "use a queue in front of the server; AsyncLLM.pause_generation is for programs"
HANG_UP = "close the connection: that aborts its request"
WEIGHTS = "weights never change while the server runs: start it again with another model"
CACHE = "give requests a cache_salt of their own where they must not share; LLM.reset_prefix_cache() is for programs"
PROFILE = "LLM(profiler_config=...) with start_profile() and stop_profile() is for programs"

ABSENT_ROUTES: dict[str, str] = {
    "/v1/chat/completions/batch": "send each conversation to /v1/chat/completions, at the same time: they share passes",
    "/v1/messages": f"Anthropic's API is not here: {MESSAGES}",
    "/v1/messages/count_tokens": "Anthropic's API is not here: /tokenize counts the tokens of messages",
    "/cohere/v2/chat": f"Cohere's API is not here: {MESSAGES}",
    "/v1/systemone": "use /v1/chat/completions with structured_outputs or response_format",
    "/v1/responses/{response_id}/cancel": f"responses do not run in the background: {HANG_UP}",
    "/v1/embeddings": NOT_POOLING,
    "/v2/embed": NOT_POOLING,
    "/pooling": NOT_POOLING,
    "/classify": NOT_POOLING,
    "/score": NOT_POOLING,
    "/v1/score": NOT_POOLING,
    "/rerank": NOT_POOLING,
    "/v1/rerank": NOT_POOLING,
    "/v2/rerank": NOT_POOLING,
    "/generative_scoring": "use /v1/completions with max_tokens 1 and logprobs, and read those of your labels",
    "/v1/audio/transcriptions": TEXT_ONLY,
    "/v1/audio/translations": TEXT_ONLY,
    "/v1/realtime": TEXT_ONLY,
    "/v1/load_lora_adapter": NO_LORA,
    "/v1/unload_lora_adapter": NO_LORA,
    "/inference/v1/generate": TOKENS,
    "/inference/v1/abort_requests": HANG_UP,
    "/abort_requests": HANG_UP,
    "/v1/chat/completions/render": RENDER,
    "/v1/completions/render": RENDER,
    "/v1/responses/render": RENDER,
    "/v1/messages/render": RENDER,
    "/cohere/v2/chat/render": RENDER,
    "/v1/chat/completions/derender": DERENDER,
    "/v1/completions/derender": DERENDER,
    "/load": "/metrics has the load",
    "/server_info": "/v1/models, /version and /metrics say what runs here",
    "/kv_event_sources": "keys and values stay on the device, and no events of them are published",
    "/ping": "use /health",
    "/invocations": f"{MESSAGES}, or /v1/completions",
    "/start_profile": PROFILE,
    "/stop_profile": PROFILE,
    "/reset_prefix_cache": CACHE,
    "/reset_mm_cache": TEXT_ONLY,
    "/reset_encoder_cache": TEXT_ONLY,
    "/sleep": MEMORY,
    "/wake_up": MEMORY,
    "/is_sleeping": MEMORY,
    "/release_kv_cache_memory": MEMORY,
    "/pause": PAUSE,
    "/resume": PAUSE,
    "/is_paused": PAUSE,
    "/init_weight_transfer_engine": WEIGHTS,
    "/shutdown_weight_transfer_engine": WEIGHTS,
    "/start_weight_update": WEIGHTS,
    "/start_draft_weight_update": WEIGHTS,
    "/update_weights": WEIGHTS,
    "/finish_weight_update": WEIGHTS,
    "/update_weight_version": WEIGHTS,
    "/weight_info": WEIGHTS,
    "/weight_checker": WEIGHTS,
    "/get_world_size": ONE_DEVICE,
    "/collective_rpc": ONE_DEVICE,
    "/scale_elastic_ep": ONE_DEVICE,
    "/is_scaling_elastic_ep": ONE_DEVICE,
    "/fault_tolerance/apply": ONE_DEVICE,
    "/fault_tolerance/status": ONE_DEVICE,
}

NO_FILES = "this server keeps no files: put the text into the request"
NO_TRAINING = "the server trains nothing; `paceline train` is for drafters"
NO_STATE = "use /v1/responses with previous_response_id"
ABSENT_AREAS: dict[str, str] = {
    "/v1/batches": "send the requests themselves, at the same time: they share passes",
    "/v1/files": NO_FILES,
    "/v1/uploads": NO_FILES,
    "/v1/vector_stores": NO_FILES,
    "/v1/assistants": NO_STATE,
    "/v1/threads": NO_STATE,
    "/v1/conversations": NO_STATE,
    "/v1/responses/{response_id}/input_items": "a stored response is its output: keep your input",
    "/v1/responses/input_tokens": "/tokenize counts the tokens of messages",
    "/v1/responses/compact": "a conversation is sent as it is: shorten it",
    "/v1/moderations": NOT_POOLING,
    "/v1/audio": TEXT_ONLY,
    "/v1/images": TEXT_ONLY,
    "/v1/videos": TEXT_ONLY,
    "/v1/fine_tuning": NO_TRAINING,
    "/v1/evals": "use `paceline bench`, or lm-evaluation-harness over /v1/completions",
}


def add_absent_routes(app: FastAPI) -> None:
    for path, reason in ABSENT_ROUTES.items():
        app.add_api_route(path, _refusing(path, reason), methods=["GET", "POST"], include_in_schema=False)
    for path, reason in ABSENT_AREAS.items():
        for below in ("", "/{rest:path}"):
            refuse = _refusing(path, reason)
            app.add_api_route(path + below, refuse, methods=["GET", "POST", "DELETE"], include_in_schema=False)


def _refusing(path: str, reason: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    async def refuse() -> Response:
        raise ApiError(404, f"this server has no {path}: {reason}", code="route_not_supported")

    return refuse
