"""vLLM's place for what comes out: `from paceline.outputs import RequestOutput`."""

from paceline.core.logprobs import Logprob
from paceline.core.outputs import CompletionOutput, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
