"""Fixtures of the verbs' tests."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the verb would have started, without a model and without a port."""
    seen: dict[str, Any] = {}

    class Engine:
        engine = SimpleNamespace(core=SimpleNamespace(runner=SimpleNamespace(kv_cache=torch.zeros(1))))

        def __init__(self, model: str, speculative: Any, **options: Any) -> None:
            seen.update(model=model, speculative=speculative, options=options)

        def get_tokenizer(self) -> Any:
            return SimpleNamespace(control_tokens=SimpleNamespace(make_ready=lambda: seen.update(ready=True)))

        def prepare_structured_outputs(self) -> None:
            seen.update(structured=True)

    def run_server(backend: Any, config: Any, host: str, port: int, log_level: str) -> int:
        seen.update(backend=backend, config=config, host=host, port=port, log_level=log_level)
        return 0

    monkeypatch.setattr("paceline.llm.AsyncLLM", Engine)
    monkeypatch.setattr("paceline.serve.generate.over_async_llm.OverAsyncLLM", lambda llm, methods: tuple(methods))
    monkeypatch.setattr("paceline.serve.http.server.run_server", run_server)
    return seen
