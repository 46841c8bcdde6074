"""The tables of docs/from-vllm.md that are made from the code: python -m tests.from_vllm_page writes them anew.

What vLLM has is written down here by name, as of vLLM 0.24 (routes: 0.32); what becomes of a name is looked up in our
signatures and routes.
"""

import dataclasses
import importlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path

from paceline import LLM, AsyncLLM, LLMEngine, SamplingParams
from paceline.core.foreign_options import CALL, ENGINE, REQUEST, SAMPLING, SERVE, SPECULATIVE, UNREAD, Foreign
from paceline.engine.arg_utils import OWN
from paceline.serve.http.absent_routes import ABSENT_ROUTES
from paceline.serve.http.request_bodies import UNSUPPORTED, CompletionRequest
from paceline.serve.responses.request import ResponsesRequest

PAGE = Path(__file__).parent.parent / "docs" / "from-vllm.md"

# vLLM's name -> ours ("": absent) and a word about it
NAMES: dict[str, tuple[str, str]] = {
    "vllm.LLM": ("paceline.LLM", ""),
    "vllm.SamplingParams": ("paceline.SamplingParams", ""),
    "vllm.EngineArgs": ("paceline.EngineArgs", ""),
    "vllm.AsyncEngineArgs": ("paceline.AsyncEngineArgs", ""),
    "vllm.LLMEngine": ("paceline.LLMEngine", ""),
    "vllm.AsyncLLMEngine": ("paceline.AsyncLLMEngine", "the same class as `AsyncLLM`"),
    "vllm.RequestOutput": ("paceline.RequestOutput", ""),
    "vllm.CompletionOutput": ("paceline.CompletionOutput", ""),
    "vllm.TextPrompt": ("paceline.TextPrompt", ""),
    "vllm.TokensPrompt": ("paceline.TokensPrompt", ""),
    "vllm.sampling_params.SamplingParams": ("paceline.sampling_params.SamplingParams", ""),
    "vllm.sampling_params.StructuredOutputsParams": ("paceline.sampling_params.StructuredOutputsParams", ""),
    "vllm.sampling_params.RequestOutputKind": ("paceline.sampling_params.RequestOutputKind", ""),
    "vllm.outputs.RequestOutput": ("paceline.outputs.RequestOutput", ""),
    "vllm.outputs.CompletionOutput": ("paceline.outputs.CompletionOutput", ""),
    "vllm.inputs.TextPrompt": ("paceline.inputs.TextPrompt", ""),
    "vllm.inputs.TokensPrompt": ("paceline.inputs.TokensPrompt", ""),
    "vllm.engine.arg_utils.EngineArgs": ("paceline.engine.arg_utils.EngineArgs", ""),
    "vllm.engine.arg_utils.AsyncEngineArgs": ("paceline.engine.arg_utils.AsyncEngineArgs", ""),
    "vllm.logprobs.Logprob": ("paceline.outputs.Logprob", ""),
    "vllm.v1.engine.async_llm.AsyncLLM": ("paceline.AsyncLLM", ""),
    "vllm.v1.metrics.reader.Counter": ("paceline.llm.metrics.Counter", "and `Gauge`, `Histogram`, `Vector`"),
    "vllm.config.ProfilerConfig": ("paceline.llm.profile.ProfilerConfig", "PyTorch's profiler only"),
    "vllm.utils.argparse_utils.FlexibleArgumentParser": ("argparse.ArgumentParser", "Python's own will do"),
    "vllm.distributed.cleanup_dist_env_and_memory": ("gc.collect", "an engine that nobody holds is gone"),
    "vllm.lora.request.LoRARequest": ("", "no adapters"),
    "vllm.PoolingParams": ("", "no embedding, classifying or scoring"),
    "vllm.BeamSearchParams": ("", "no beam search"),
}
METHODS: dict[str, tuple[type, str]] = {
    "LLM": (
        LLM,
        "generate chat get_tokenizer get_default_sampling_params get_metrics reset_prefix_cache start_profile "
        "stop_profile from_engine_args beam_search encode embed classify score enqueue enqueue_chat "
        "wait_for_completion sleep wake_up collective_rpc apply_model get_world_size reset_mm_cache "
        "start_weight_update update_weights finish_weight_update",
    ),
    "LLMEngine": (
        LLMEngine,
        "from_engine_args add_request step abort_request has_unfinished_requests get_num_unfinished_requests "
        "get_tokenizer get_metrics reset_prefix_cache add_lora remove_lora list_loras pin_lora sleep wake_up "
        "is_sleeping collective_rpc",
    ),
    "AsyncLLM": (
        AsyncLLM,
        "from_engine_args generate abort check_health pause_generation resume_generation is_paused reset_prefix_cache "
        "get_tokenizer shutdown encode add_lora sleep wake_up start_profile stop_profile collective_rpc",
    ),
}
SAMPLING_FIELDS = [
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "skip_clone",
    "structured_outputs",
    "logit_bias",
    "allowed_token_ids",
    "extra_args",
    "bad_words",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
]
# Those of its server, beside the ones that absent_routes.py has; /ready and others are ours alone.
ROUTES = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}", "/v1/models",
    "/tokenize", "/detokenize", "/tokenizer_info", "/health", "/version", "/metrics", "/docs", "/openapi.json",
]  # fmt: skip


def table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(heading), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return hasattr(importlib.import_module(module), last)


def names_table() -> str:
    rows = []
    for theirs, (ours, note) in NAMES.items():
        same = ours == theirs.replace("vllm", "paceline", 1)
        rows.append(
            (f"`{theirs}`", f"`{ours}`" if ours else "absent", "same" if same else "other" if ours else "absent", note)
        )
    return table(("vLLM", "here", "", "note"), rows)


def methods_table() -> str:
    rows = []
    for owner, (kind, names) in METHODS.items():
        here = [name for name in names.split() if hasattr(kind, name)]
        absent = [name for name in names.split() if not hasattr(kind, name)]
        rows.append((f"`{owner}`", listed(here), listed(absent)))
    return table(("class", "same", "absent"), rows)


def sampling_table() -> str:
    ours = {field.name: field for field in dataclasses.fields(SamplingParams) if field.init}
    rows = []
    for name in (*SAMPLING_FIELDS, *(name for name in ours if name not in SAMPLING_FIELDS)):
        if name not in ours:
            rows.append((f"`{name}`", "", "absent"))
            continue
        what = "ours alone" if name not in SAMPLING_FIELDS else "no effect" if name in SAMPLING else "same"
        rows.append((f"`{name}`", f"`{ours[name].default}`".replace("RequestOutputKind.", ""), what))
    return table(("field", "default", ""), rows)


def foreign_table(options: Mapping[str, Foreign]) -> str:
    rows = []
    for name, option in options.items():
        values = option.values
        if values is None:
            shown = "any"
        elif len(values) > 4:
            shown = f"`{values[0]}` to `{values[-1]}`"
        else:
            shown = ", ".join(f"`{value!r}`" for value in values) or "none but None"
        rows.append((f"`{name}`", shown, option.reason))
    return table(("name", "accepted", "why it has no effect, and another value is refused"), rows)


def routes_table() -> str:
    rows = [(f"`{path}`", "same", "") for path in ROUTES]
    rows += [(f"`{path}`", "absent", reason) for path, reason in ABSENT_ROUTES.items()]
    return table(("route", "", "what to use instead, or why it is not here"), rows)


def openai_table() -> str:
    """OpenAI's fields for what is not here, by the body that they belong to."""
    completions = {name: row for name, row in CompletionRequest.unsupported.items() if name not in UNSUPPORTED}
    bodies = {
        "chat and completions": UNSUPPORTED,
        "completions": completions,
        "responses": ResponsesRequest.unsupported,
    }
    rows = []
    for body, fields in bodies.items():
        for name, (values, reason) in fields.items():
            rows.append((f"`{name}`", body, ", ".join(f"`{value!r}`" for value in values) or "none but null", reason))
    return table(("field", "of", "accepted", "why another value is refused"), rows)


def unread_table() -> str:
    return table(("field", "why it has no effect"), [(f"`{name}`", reason) for name, reason in UNREAD.items()])


def engine_list() -> str:
    given = inspect.signature(LLM.__init__).parameters
    assert set(OWN) <= set(given)
    return listed(OWN)


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


BLOCKS = {
    "names": names_table,
    "methods": methods_table,
    "sampling": sampling_table,
    "engine": engine_list,
    "routes": routes_table,
    "no effect: engine": lambda: foreign_table(ENGINE),
    "no effect: serve": lambda: foreign_table(SERVE),
    "no effect: calls": lambda: foreign_table(CALL),
    "no effect: sampling": lambda: foreign_table(SAMPLING),
    "no effect: request": lambda: foreign_table(REQUEST),
    "no effect: OpenAI's": openai_table,
    "no effect: unread": unread_table,
    "no effect: speculative_config": lambda: foreign_table(SPECULATIVE),
}


def written_anew(page: str) -> str:
    for name, make in BLOCKS.items():
        begin = f"<!-- {name} -->\n"
        before, found, after = page.partition(begin)
        assert found, f"docs/from-vllm.md has no block {name!r}"
        page = before + begin + make() + "\n<!-- end -->" + after.partition("<!-- end -->")[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(written_anew(PAGE.read_text()))
