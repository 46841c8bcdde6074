"""The ASGI application: routes, and how errors become answers.

>>> app = create_app(backend, ServerConfig(("smollm2-135m",)))                       # doctest: +SKIP
"""

from typing import Annotated, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import paceline
from paceline.llm.worker import in_worker
from paceline.serve.config import ServerConfig
from paceline.serve.generate.answer import CHAT, PLAIN, GenerationResponse
from paceline.serve.generate.params import tokenize_chat, tokenize_text
from paceline.serve.generate.served_engine import ServedEngine
from paceline.serve.generate.service import Service
from paceline.serve.http.absent_routes import add_absent_routes
from paceline.serve.http.body import BodyReader
from paceline.serve.http.errors import ApiError, as_api_error
from paceline.serve.http.limits import check_model
from paceline.serve.http.middleware import REQUEST_ID, Guard
from paceline.serve.http.openapi import describe_bodies, takes
from paceline.serve.http.pace import Pace
from paceline.serve.http.page import add_page
from paceline.serve.http.request_bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from paceline.serve.http.response_bodies import (
    ChatCompletion,
    Completion,
    Detokenized,
    ErrorBody,
    ModelCard,
    ModelList,
    Tokenized,
    TokenizerInfo,
    Version,
)
from paceline.serve.http.tenants import TENANT, Tenant
from paceline.serve.observe.exposition import CONTENT_TYPE, Exposition
from paceline.serve.observe.live import live
from paceline.serve.observe.polled import Polled
from paceline.serve.responses.request import ResponsesRequest
from paceline.serve.responses.routes import add_responses

GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "something in the request is wrong; the message says what to do",
        401: "API key missing or wrong",
        404: "no such model, or no such stored response",
        408: "took longer than the server allows",
        413: "body too large",
        429: "queue full; see Retry-After",
        503: "shutting down, or the engine is not running",
    }.items()
}


def create_app(backend: ServedEngine, config: ServerConfig) -> FastAPI:
    service = Service(backend, config)
    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        description="OpenAI-compatible completions with speculative decoding in the client's hands",
        docs_url=None,  # the framework's page loads scripts from elsewhere; ours works offline
        redoc_url=None,
        responses=ERRORS,
    )
    app.state.service = service
    app.state.pace = Pace(config.max_rate_per_client)
    reader = BodyReader(backend.max_model_len, config.strict)
    _add_generation(app, service, reader)
    add_responses(app, service, reader)
    _add_tokenizer(app, service, reader)
    _add_operations(app, service)
    add_page(app)
    _add_error_handlers(app)
    describe_bodies(app, ChatCompletionRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
    add_absent_routes(app)
    paths = frozenset(path for route in app.routes if (path := getattr(route, "path", "")) and "{" not in path)
    app.add_middleware(
        Guard,
        config=config,
        metrics=service.metrics,
        pace=app.state.pace,
        known_paths=paths,
        generating_paths=GENERATING_PATHS,
    )
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
        )
    return app


def _add_generation(app: FastAPI, service: Service, reader: BodyReader) -> None:
    ChatBody = Annotated[ChatCompletionRequest, reader.dependency(ChatCompletionRequest)]
    CompletionBody = Annotated[CompletionRequest, reader.dependency(CompletionRequest)]

    @app.post("/v1/chat/completions", response_model=ChatCompletion, tags=["OpenAI"], **takes(ChatCompletionRequest))
    async def chat_completions(body: ChatBody) -> Response:
        """Answer a conversation. With `stream: true` the answer comes as server-sent events."""
        return GenerationResponse(service, body, CHAT)

    @app.post("/v1/completions", response_model=Completion, tags=["OpenAI"], **takes(CompletionRequest))
    async def completions(body: CompletionBody) -> Response:
        """Continue a text. With `stream: true` the answer comes as server-sent events."""
        return GenerationResponse(service, body, PLAIN)

    @app.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
    async def models() -> Any:
        return {"object": "list", "data": [_card(service, name) for name in service.config.model_names]}

    @app.get("/v1/models/{model:path}", response_model=ModelCard, tags=["OpenAI"])
    async def model(model: str) -> Any:
        return _card(service, check_model(model, service.config))


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(service.begin_s),
        "owned_by": "paceline",
        "max_model_len": service.backend.max_model_len,
    }


def _add_tokenizer(app: FastAPI, service: Service, reader: BodyReader) -> None:
    TokenizeBody = Annotated[TokenizeRequest, reader.dependency(TokenizeRequest)]
    DetokenizeBody = Annotated[DetokenizeRequest, reader.dependency(DetokenizeRequest)]

    @app.post("/tokenize", tags=["tokens"], responses={200: {"model": Tokenized}}, **takes(TokenizeRequest))
    async def tokenize(body: TokenizeBody) -> Response:
        check_model(body.model, service.config)
        if body.messages is not None:
            tokens = await tokenize_chat(
                body.messages, service.backend, body.add_generation_prompt, tools=body.tools or ()
            )
        else:
            tokens = await tokenize_text(body.prompt or "", service.backend, body.add_special_tokens)
        if len(tokens) > reader.max_values:  # no route would take them back
            message = f"the text has {len(tokens)} tokens, and at most {reader.max_values} are listed: send less of it"
            raise ApiError(400, message, code="too_long", param="prompt" if body.messages is None else "messages")
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": service.backend.max_model_len}
        return await in_worker(len(tokens), lambda: JSONResponse(answer))

    @app.get("/tokenizer_info", response_model=TokenizerInfo, tags=["tokens"])
    async def tokenizer_info() -> Any:
        """For clients that apply the chat template themselves."""
        return {**service.backend.tokenizer.info(), "model_max_length": service.backend.max_model_len}

    @app.post("/detokenize", response_model=Detokenized, tags=["tokens"], **takes(DetokenizeRequest))
    async def detokenize(body: DetokenizeBody) -> Any:
        check_model(body.model, service.config)
        vocab_size = service.backend.vocab_size
        if max(body.tokens, default=0) >= vocab_size:
            raise ApiError(400, f"token ids go from 0 to {vocab_size - 1}, got {max(body.tokens)}", param="tokens")
        decode = service.backend.tokenizer.decode
        return {"prompt": await in_worker(len(body.tokens), lambda: decode(body.tokens, body.skip_special_tokens))}


def _add_operations(app: FastAPI, service: Service) -> None:
    exposition = Exposition(service)
    metrics_text = Polled[None](lambda _: exposition.render())
    live_json = Polled[Tenant](lambda tenant: bytes(JSONResponse(live(service, tenant)).body))

    @app.get("/health", tags=["operations"])
    async def health() -> dict[str, str]:
        """The process answers and its engine runs."""
        if service.engine_dead:
            raise ApiError(503, "the engine is not running: restart this server", code="engine_dead")
        return {"status": "ok"}

    @app.get("/ready", tags=["operations"])
    async def ready() -> dict[str, str]:
        """New work is taken: what a load balancer should ask."""
        if service.engine_dead or service.gate.draining:
            raise ApiError(503, "not taking new work: shutting down, or the engine is not running", code="not_ready")
        return {"status": "ready"}

    @app.get("/version", response_model=Version, tags=["operations"])
    async def version() -> Any:
        return {"version": paceline.__version__}

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """Prometheus' text form."""
        return Response(metrics_text.body(None), media_type=CONTENT_TYPE)

    @app.get("/api/live", tags=["operations"])
    async def live_figures(request: Request) -> Response:
        """What the page at / shows. Text is shown to the key that it belongs to, and to admin keys."""
        return Response(live_json.body(request.scope[TENANT]), media_type="application/json")


def _add_error_handlers(app: FastAPI) -> None:
    def respond(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(paceline.PacelineError)
    async def on_paceline_error(request: Request, error: Exception) -> JSONResponse:
        return respond(as_api_error(error, request.scope[REQUEST_ID]))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: see /docs for what this server answers to"
        return respond(ApiError(error.status_code, message, headers=error.headers))
