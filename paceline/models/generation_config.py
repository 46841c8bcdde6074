"""The defaults of sampling that a model brings, in generation_config.json, honoured as vLLM does.

auto     the file in the model's own folder
vllm     none: SamplingParams' own defaults
FOLDER   the file in that folder
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOptionError, ModelLoadError
from paceline.models.config import read_json

FILE = "generation_config.json"
# Hugging Face's name -> ours. Others (do_sample, eos_token_id, ...) say nothing about a default here.
TAKEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(model: Path, source: str = "auto", override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options of `SamplingParams` that hold where a request says nothing. `override` stands before the file."""
    for name in override or {}:
        if name not in TAKEN:
            raise InvalidOptionError(
                f"override_generation_config takes no {name!r}: it has defaults of sampling, {', '.join(TAKEN)}"
            )
    found: dict[str, Any] = {}
    if source != "vllm":
        folder = model if source == "auto" else Path(source).expanduser()
        path = folder / FILE
        if path.is_file():
            found = dict(read_json(path))
        elif source != "auto":
            raise ModelLoadError(f"generation_config {source!r}: there is no {path}. Give auto, vllm, or a folder.")
    found |= dict(override or {})
    return {TAKEN[name]: value for name, value in found.items() if name in TAKEN and value is not None}
