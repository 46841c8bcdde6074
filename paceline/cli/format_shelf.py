"""Engines for the formats of a comparison: weights are loaded once, and shared where they are the same."""

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli import options

if TYPE_CHECKING:
    from paceline.bench.run.backend import Backend
    from paceline.bench.run.format_grid import Format
    from paceline.bench.run.grid import Setting
    from paceline.llm import LLM


class FormatShelf:
    """`keep_all`: all weights stay in memory; else the last ones only."""

    def __init__(self, args: argparse.Namespace, formats: "Sequence[Format]", *, keep_all: bool = True) -> None:
        self._args, self._keep_all = args, keep_all
        self._formats = {form.name: form for form in formats}
        self._loaded: dict[tuple[str, ...], Any] = {}

    def backend(self, setting: "Setting") -> "Backend":
        from paceline.bench.run.engine_backend import EngineBackend
        from paceline.llm import AsyncLLM

        assert setting.form is not None
        form = self._formats[setting.form]
        llm = AsyncLLM(self._model(form), setting.config, **self._options(form))
        self._keep(form, llm.engine.model)
        return EngineBackend(llm, setting.config, form.model)

    def llm(self, name: str, config: Mapping[str, Any] | None = None) -> "LLM":
        from paceline.llm import LLM

        form = self._formats[name]
        llm = LLM(self._model(form), dict(config or {"method": "none"}), **self._options(form))
        self._keep(form, llm.engine.model)
        return llm

    def _model(self, form: "Format") -> Any:
        return self._loaded.get(_weights(form), form.model)

    def _options(self, form: "Format") -> dict[str, Any]:
        return options.model_options(self._args) | form.options

    def _keep(self, form: "Format", model: Any) -> None:
        if not self._keep_all:
            self._loaded.clear()
        self._loaded[_weights(form)] = model


def _weights(form: "Format") -> tuple[str, ...]:
    """Formats with the same differ in nothing but the engine's options."""
    return form.model, str(form.options.get("dtype")), str(form.options.get("quantization"))
