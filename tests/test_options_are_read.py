"""No option is taken and dropped: each is read somewhere, or is in the list of those without effect."""

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import LLM, AsyncLLM, LLMEngine, SamplingParams
from paceline.core.foreign_options import SAMPLING
from paceline.engine.config import EngineConfig
from paceline.models.loader import load_model
from paceline.models.tokenizer import Tokenizer
from paceline.serve.config import ServerConfig
from paceline.spec.methods import PROPOSERS

PACKAGE = Path(paceline.__file__).parent


@pytest.fixture(scope="module")
def attributes_read() -> dict[str, set[str]]:
    """Attribute -> files in which it is read."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.setdefault(node.attr, set()).add(str(path.relative_to(PACKAGE)))
    return found


@pytest.mark.parametrize("kind", [SamplingParams, ServerConfig, EngineConfig])
def test_fields_of_options_are_read_outside_of_where_they_are_checked(
    kind: Any, attributes_read: dict[str, set[str]]
) -> None:
    own = str(Path(inspect.getfile(kind)).relative_to(PACKAGE))
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    unread = {name for name in names if not attributes_read.get(name, set()) - {own}}
    assert unread <= set(SAMPLING), unread


def public_calls() -> Iterator[Any]:
    for kind in (LLM, AsyncLLM, LLMEngine, Tokenizer):
        for name, call in inspect.getmembers(kind, inspect.isroutine):
            if (not name.startswith("_") or name in ("__init__", "__call__")) and "paceline" in str(call.__module__):
                yield pytest.param(call, id=f"{kind.__name__}.{name}")
    yield pytest.param(load_model, id="load_model")
    for name, row in PROPOSERS.items():
        module, _, proposer = row.target.partition(":")
        yield pytest.param(getattr(importlib.import_module(module), proposer).__init__, id=name)


@pytest.mark.parametrize("call", list(public_calls()))
def test_arguments_of_public_calls_are_used(call: Callable[..., Any]) -> None:
    if not inspect.isfunction(inspect.unwrap(call)) and not inspect.ismethod(call):
        return
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(call))).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    if not has_code(function):
        return  # a protocol's, or one that every drafter may leave as it is
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    names = {one.arg for one in given} | {one.arg for one in (function.args.vararg, function.args.kwarg) if one}
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    assert names - used <= {"self", "cls", "services", "largest"}


def has_code(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)) for one in function.body)
