"""Paceline: LLM inference built around exact speculative decoding.

>>> from paceline import LLM, SamplingParams                                        # doctest: +SKIP
>>> llm = LLM("smollm2-135m", speculative_config={"method": "ngram"})
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
    from paceline.core.sampling_params import SamplingParams
    from paceline.core.structured import StructuredOutputsParams
    from paceline.errors import PacelineError
    from paceline.llm import LLM, AsyncLLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "PacelineError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOME = {
    "LLM": "paceline.llm",
    "AsyncLLM": "paceline.llm",
    "SamplingParams": "paceline.core.sampling_params",
    "StructuredOutputsParams": "paceline.core.structured",
    "CompletionOutput": "paceline.core.outputs",
    "RequestMetrics": "paceline.core.outputs",
    "RequestOutput": "paceline.core.outputs",
    "PacelineError": "paceline.errors",
}


def __getattr__(name: str) -> Any:
    """Load on first use: `paceline --help` must not wait for torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)
