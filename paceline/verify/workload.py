"""Prompts, sampling settings, and plain decoding as the truth that everything else is compared with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.core.outputs import RequestOutput
from paceline.core.sampling_params import SamplingParams
from paceline.core.structured import StructuredOutputsParams
from paceline.llm import LLM
from paceline.models.loader import LoadedModel
from paceline.spec.config.speculative_config import at_default_size

# Kinds of text that drafters find easy and hard; repetition makes lookups hit.
PROMPTS = (
    "The capital of France is",
    "one two three four one two three four one two three",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time there was a",
    "Q: What is 12 times 12?\nA:",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born":',
    "import os\nimport sys\nimport",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
)

GREEDY = "greedy"
# Keys that are forced and values that are free, so that grammar and text take turns.
SCHEMA = StructuredOutputsParams(
    json={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["capital", "harbour", "village"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["city", "kind", "size"],
        "additionalProperties": False,
    },
    disable_any_whitespace=True,
)
LONG_SETTINGS = (GREEDY, "T=1")  # of long answers
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    GREEDY: {"temperature": 0.0},
    "T=1": {"temperature": 1.0},
    "T=0.7 top_p": {"temperature": 0.7, "top_p": 0.9},
    "T=1.3 min_p": {"temperature": 1.3, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias, top_k": {"temperature": 1.0, "top_k": 40, "logit_bias": {11: 2.0, 30: -5.0}, "min_tokens": 4},
    "JSON schema": {"temperature": 1.0, "structured_outputs": SCHEMA},
    "greedy, JSON schema": {"temperature": 0.0, "structured_outputs": SCHEMA},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
}


def is_greedy(name: str) -> bool:
    return bool(SETTINGS[name]["temperature"] == 0.0)


def is_truncated(name: str) -> bool:
    """Tokens are cut off: rounding may decide on which side of the cut one lies."""
    return not SETTINGS[name].keys().isdisjoint(("top_k", "top_p", "min_p"))


@dataclass(slots=True)
class Workload:
    """Every prompt under every setting, with the tokens that plain decoding gives, one request at a time."""

    model: LoadedModel
    prompts: list[list[int]]
    settings: list[str]
    max_tokens: int
    truth: list[list[int]] = field(default_factory=list)
    name: str = "short answers"
    ignore_eos: bool = False  # every answer is as long as max_tokens says

    @property
    def cases(self) -> list[tuple[list[int], str]]:
        return [(prompt, setting) for prompt in self.prompts for setting in self.settings]

    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(**SETTINGS[setting], seed=i, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos)
            for i, (_, setting) in enumerate(self.cases)
        ]

    def engine(self, speculative: Mapping[str, Any] | None = None, **options: Any) -> LLM:
        longest = max(map(len, self.prompts)) + self.max_tokens
        sizes = {"max_model_len": longest + 8, "kv_cache_memory_bytes": 256 << 20}
        config = at_default_size(speculative or {"method": "none"})  # drafts are to be verified, pay or not
        return LLM(self.model, config, **(sizes | options))

    def run(self, llm: LLM, on_step: Callable[[int, int], None] | None = None) -> list[RequestOutput]:
        return llm.generate([prompt for prompt, _ in self.cases], self.params(), on_step=on_step)

    def find_truth(self, on_step: Callable[[int, int], None] | None = None) -> None:
        llm = self.engine(max_num_seqs=1, enable_prefix_caching=False)
        self.truth = tokens_of(self.run(llm, on_step))

    def sequences(self) -> list[list[int]]:
        """Prompt and true output, for oracle drafts."""
        return [prompt + output for (prompt, _), output in zip(self.cases, self.truth, strict=True)]


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    for output in outputs:
        if output.error is not None:
            raise output.error
    return [output.outputs[0].token_ids for output in outputs]


def make_workload(
    model: LoadedModel, num_prompts: int, settings: Sequence[str], max_tokens: int, *, ignore_eos: bool = False
) -> Workload:
    texts = [PROMPTS[i % len(PROMPTS)] + " and" * (i // len(PROMPTS)) for i in range(num_prompts)]
    prompts = [model.tokenizer.encode(text) for text in texts]
    name = f"{'long' if ignore_eos else 'short'} answers"
    return Workload(model, prompts, list(settings), max_tokens, name=name, ignore_eos=ignore_eos)
