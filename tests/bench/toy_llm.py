"""Our engine over the toy target, and a backend that answers by itself: benches in milliseconds."""

import asyncio
import time
from pathlib import Path
from typing import Any

from paceline.bench.run.backend import Answer, Sampling
from paceline.bench.workloads.workload import Prompt
from paceline.core.draft_counts import DraftCounts
from paceline.models.loader import LoadedModel
from tests.toy import ToyDecoder, ToyTokenizer


def toy_model(sharpness: float = 3.0) -> LoadedModel:
    decoder: Any = ToyDecoder(sharpness)
    tokenizer: Any = ToyTokenizer()
    return LoadedModel("toy", Path("toy"), decoder.config, decoder, tokenizer, "toy")


class FakeBackend:
    """Answers after a moment; from request number `dies_after` on it only fails."""

    def __init__(self, token_s: float = 0.0, dies_after: int | None = None, outputs: str = "same") -> None:
        self.token_s, self.dies_after, self.outputs = token_s, dies_after, outputs
        self.num_running = self.most_running = self.num_asked = 0
        self.closed = False

    async def generate(self, prompt: Prompt, sampling: Sampling, index: int) -> Answer:
        answer = Answer(prompt.prompt_id, prompt.category, time.perf_counter())
        self.num_asked += 1
        if self.dies_after is not None and self.num_asked > self.dies_after:
            answer.error = "ConnectionRefusedError: gone"
            return answer
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(self.token_s)
            answer.event_s.append(time.perf_counter())
        self.num_running -= 1
        answer.num_output_tokens = sampling.max_tokens
        answer.num_prompt_tokens = 3
        answer.output_hash = f"{self.outputs}-{index}"
        answer.counts = DraftCounts(8, 4, [3, 1], 4, num_steps=sampling.max_tokens // 2)
        return answer

    def counts(self) -> DraftCounts | None:
        return None

    def figures(self) -> dict[str, float]:
        return {"num_passes": 10.0 * self.num_asked, "draft_s": 0.0}

    def describe(self) -> dict[str, Any]:
        return {"backend": "fake"}

    def close(self) -> None:
        self.closed = True
