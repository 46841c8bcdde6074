"""Where what is learned of some drafters on an engine's model is kept."""

import json
from collections.abc import Sequence
from pathlib import Path

from paceline.models.learned_cache import LearnedEntry, file_state, learned_entry
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts


def entry_of(drafters: Sequence[SpeculativeConfig], services: EngineParts) -> LearnedEntry | None:
    """None where nothing is kept: a model in memory, of the engine or of a drafter, has no name to find it by."""
    models = [config.options.get("model") for config in drafters]
    if services.facts is None or not all(model is None or isinstance(model, str) for model in models):
        return None
    options = [[config.method, dict(config.options)] for config in drafters]
    files = [file_state(Path(model)) for model in models if model]
    return learned_entry({**services.facts, "drafters": json.dumps([options, files], default=str)})
