"""`POST /v1/responses`, and the stored ones by their id."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from paceline.serve.generate.answer import GenerationResponse
from paceline.serve.generate.service import Service
from paceline.serve.http.body import BodyReader
from paceline.serve.http.errors import ApiError
from paceline.serve.http.message_bodies import Message
from paceline.serve.http.openapi import takes
from paceline.serve.http.tenants import TENANT
from paceline.serve.responses.request import ResponsesRequest
from paceline.serve.responses.store import ResponseStore
from paceline.serve.responses.translate import chat_request, messages_of
from paceline.serve.responses.writers import Responses


def add_responses(app: FastAPI, service: Service, reader: BodyReader) -> None:
    store = ResponseStore(service.config.max_stored_responses, service.config.max_stored_bytes)
    ResponsesBody = Annotated[ResponsesRequest, reader.dependency(ResponsesRequest)]

    @app.post("/v1/responses", tags=["OpenAI"], **takes(ResponsesRequest))
    async def responses(request: Request, body: ResponsesBody) -> Response:
        """Answer an input. With `stream: true` the answer comes as server-sent events."""
        tenant_id = request.scope[TENANT].id
        before = _before(store, tenant_id, body)
        keep = partial(_keep, store, tenant_id, [*before, *messages_of(body.input)], body)
        return GenerationResponse(service, chat_request(body, before), Responses(body, keep))

    @app.get("/v1/responses/{response_id}", tags=["OpenAI"])
    async def stored_response(request: Request, response_id: str) -> Response:
        """A stored answer, as it was given."""
        if request.query_params:
            name = next(iter(request.query_params))
            raise ApiError(400, f"{name} is not supported: a stored response comes whole", param=name)
        return JSONResponse(store.find(request.scope[TENANT].id, response_id).body)

    @app.delete("/v1/responses/{response_id}", tags=["OpenAI"])
    async def delete_response(request: Request, response_id: str) -> Any:
        """Forget a stored answer."""
        store.delete(request.scope[TENANT].id, response_id)
        return {"id": response_id, "object": "response", "deleted": True}


def _before(store: ResponseStore, tenant_id: str, body: ResponsesRequest) -> Sequence[Message]:
    """The conversation that the request goes on with."""
    if body.previous_response_id is None:
        return ()
    stored = store.get(tenant_id, body.previous_response_id)
    if stored is None:
        raise ApiError(
            400,
            f"there is no stored response {body.previous_response_id!r:.80}: it was never stored, or is forgotten by "
            "now; send the conversation in input",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return stored.messages


def _keep(
    store: ResponseStore,
    tenant_id: str,
    asked_messages: Sequence[Message],
    asked: ResponsesRequest,
    body: dict[str, Any],
    answer: Sequence[Message],
) -> None:
    if asked.store is not False:
        store.put(tenant_id, body, [*asked_messages, *answer])
