"""The two ways to use Paceline from Python.

>>> from paceline import LLM, SamplingParams                                        # doctest: +SKIP
>>> llm = LLM("smollm2-135m", speculative_config={"method": "ngram", "num_speculative_tokens": 4})
>>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

Without `speculative_config` the method is `auto`, which speculates where it pays; {"method": "none"} decodes plainly.

`LLM` runs the engine in the calling thread; `LLMEngine` is the same for callers that step it
themselves. `AsyncLLM` runs it in a thread of its own and hands out async streams.

A request that fails says so in its output (`error`) and leaves the others alone. A model whose pass raises, or memory
that runs out, stops an `AsyncLLM` for good: its streams end with `EngineDeadError`, and `on_death` is called.
"""

from paceline.llm.async_llm import AsyncLLM
from paceline.llm.llm_engine import LLMEngine
from paceline.llm.sync_llm import LLM

__all__ = ["LLM", "AsyncLLM", "LLMEngine"]
