"""Texts for calibrating and judging quantized models: prompts of ours with a model's own answers, or a user's file.

What a quantized model is judged on must not be what it was calibrated on, so the two have no category in common.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.bench.run.engine_backend import asked
from paceline.bench.workloads.workload import Prompt, load_workload
from paceline.core.agreement import Passage
from paceline.core.sampling_params import SamplingParams
from paceline.core.tokenizer import Tokenizer
from paceline.errors import InvalidOptionError
from paceline.llm import LLM

CALIBRATION = "chat,code,extraction,translation,maths"
HELD_OUT = "summary,code_edit"
GREEDY = SamplingParams(max_tokens=64, temperature=0.0)
# To learn from: likely answers repeat themselves, and GPTQ then fits to what they say. Measured on layer 6 of the
# default model: with 1,700 tokens of prompts alone nothing was gained on other text, with 11,000 tokens of prompts
# and sampled answers as much as on these.
SAMPLED = SamplingParams(max_tokens=128, temperature=1.0)
WINDOW = 256  # tokens of a plain text that stand together
PROMPT_FILES = (".json", ".jsonl")


def passages(llm: LLM, source: str, count: int, seed: int = 0, answers: SamplingParams = GREEDY) -> list[Passage]:
    """`source`: a workload, a file of prompts (JSON), or a file of plain text, cut into windows."""
    if count < 1:
        raise InvalidOptionError(f"at least 1 passage is needed, but {count} were asked for")
    if Path(source).is_file() and Path(source).suffix.lower() not in PROMPT_FILES:
        found = text_windows(Path(source), llm.get_tokenizer())
        return random.Random(seed).sample(found, min(count, len(found)))
    prompts = load_workload(source)
    chosen = random.Random(seed).sample(prompts, min(count, len(prompts)))
    return answered(llm, chosen, [replace(answers, seed=seed + i) for i in range(len(chosen))])


def answered(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Passage]:
    """Each prompt with the model's own answer."""
    tokenizer = llm.get_tokenizer()
    outputs = llm.generate([asked(prompt, tokenizer) for prompt in prompts], params, use_tqdm=False)
    return [
        Passage([*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids))
        for output in outputs
    ]


def text_windows(path: Path, tokenizer: Tokenizer) -> list[Passage]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"cannot read the text {path}: {error}") from error
    ids = tokenizer.encode(text)
    windows = [ids[begin : begin + WINDOW] for begin in range(0, len(ids), WINDOW)]
    found = [Passage(window, len(window)) for window in windows if len(window) > 1]
    if not found:
        raise InvalidOptionError(f"{path} holds no text")
    return found
