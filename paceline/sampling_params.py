"""vLLM's place for what a request asks for: `from paceline.sampling_params import SamplingParams`."""

from paceline.core.outputs import RequestOutputKind
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams

__all__ = ["RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
