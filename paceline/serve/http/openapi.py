"""The API's description of request bodies: routes read theirs by themselves (body.py), so they say what they take."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF_TEMPLATE = "#/components/schemas/{model}"


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """Options of a route whose body is a `model`."""
    schema = {"$ref": REF_TEMPLATE.format(model=model.__name__)}
    return {"openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}}


def describe_bodies(app: FastAPI, *models: type[BaseModel]) -> None:
    """Add the bodies' schemas to what the application says of itself."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=REF_TEMPLATE)
            describe()["components"]["schemas"].update(definitions["$defs"])
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
