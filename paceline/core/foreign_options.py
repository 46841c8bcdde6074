"""Options of vLLM and OpenAI that change nothing here: the one list of what is accepted without effect.

An option is here for one of two reasons. Either its usual value asks for what happens anyway
(`tensor_parallel_size=1`): that value is accepted and any other one is refused with the reason. Or it is a hint about
speed or memory that other kernels need (`gpu_memory_utilization`), which changes no answer: then any value is accepted.
Whoever gives some of them is told once, in one line. None always means: not given.

>>> take_foreign("LLM", ENGINE, {"tensor_parallel_size": 1})
>>> take_foreign("LLM", ENGINE, {"tensor_parallel_size": 2})
Traceback (most recent call last):
paceline.errors.InvalidOptionError: LLM: tensor_parallel_size=2 is not supported: one process runs one model ...

`tests/core/test_foreign_options.py` holds the lists, and `docs/from-vllm.md` shows them.
"""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.option_values import shown
from paceline.errors import InvalidOptionError

logger = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Foreign:
    values: tuple[Any, ...] | None  # that ask for nothing; None: any
    reason: str  # why it changes nothing, and so why another value is refused

    def accepts(self, value: Any) -> bool:
        return value is None or self.values is None or any(value is one or value == one for one in self.values)


def hint(reason: str) -> Foreign:
    return Foreign(None, reason)


def only(*values: Any, reason: str) -> Foreign:
    return Foreign(values, reason)


ONE_DEVICE = "one process runs one model on one device"
TEXT_ONLY = "models here read and write text only"
NO_LORA = "there are no adapters: merge them into the weights"
NO_OFFLOAD = "weights stay on the device"
OWN_KERNELS = "which kernels run is chosen by `kernels`, `device` and `batch_invariant`; answers are the same"
OWN_SCHEDULE = "the scheduler cuts prompts to the pass by itself; answers are the same"
OWN_LOADING = "a model folder is read as its files say"
NOT_POOLING = "models here generate text: no embedding, classifying or scoring"
LABEL = "a label: it is sent back by /v1/responses, and never changes an answer"
SENT_BACK = "a part of an earlier answer that clients send back with it"
NOTHING_STORED = "figures are always kept, and read with get_metrics(), stats() or /metrics"

# Arguments of `LLM`, `AsyncLLM` and `EngineArgs`, and flags of `paceline serve` (with dashes).
ENGINE: dict[str, Foreign] = {
    "tensor_parallel_size": only(1, reason=ONE_DEVICE),
    "pipeline_parallel_size": only(1, reason=ONE_DEVICE),
    "data_parallel_size": only(1, reason=ONE_DEVICE),
    "prefill_context_parallel_size": only(1, reason=ONE_DEVICE),
    "decode_context_parallel_size": only(1, reason=ONE_DEVICE),
    "enable_expert_parallel": only(False, reason=ONE_DEVICE),
    "distributed_executor_backend": only("uni", "mp", reason=ONE_DEVICE),
    "nnodes": only(1, reason=ONE_DEVICE),
    "disable_custom_all_reduce": hint(ONE_DEVICE),
    "tokenizer_mode": only("auto", "hf", reason="tokenizers are read from tokenizer.json"),
    "tokenizer_revision": only("main", reason="the tokenizer comes with the model"),
    "skip_tokenizer_init": only(False, reason="the engine always makes text"),
    "trust_remote_code": hint("no code of a model is ever run"),
    "revision": only("main", reason="give the folder of another revision"),
    "code_revision": only("main", reason="no code of a model is ever run"),
    "load_format": only("auto", "safetensors", "pt", "hf", "gguf", reason=OWN_LOADING),
    "config_format": only("auto", "hf", reason=OWN_LOADING),
    "model_impl": only("auto", "vllm", reason="there is one implementation of each model"),
    "hf_overrides": only({}, reason="change config.json in the model's folder"),
    "use_tqdm_on_load": hint("loading says what it does in the log"),
    "runner": only("auto", "generate", reason=NOT_POOLING),
    "convert": only("auto", "none", reason=NOT_POOLING),
    "task": only("auto", "generate", reason=NOT_POOLING),
    "gpu_memory_utilization": hint(
        "the KV pool is sized by num_kv_blocks or kv_cache_memory_bytes, or fits what is free"
    ),
    "swap_space": hint("a preempted request is computed again; kv_offload keeps its keys and values"),
    "cpu_offload_gb": only(0, reason=NO_OFFLOAD),
    "kv_offloading_size": only(0, reason="give kv_offload, in bytes"),
    "calculate_kv_scales": only(
        False, reason="kv_cache_dtype='int8' makes a scale for every head of a position, 'fp8' has none"
    ),
    "prefix_caching_hash_algo": hint("one hash is built in"),
    "disable_sliding_window": only(False, reason="a model's window is part of what it computes"),
    "enforce_eager": hint(OWN_KERNELS),
    "compilation_config": hint(OWN_KERNELS),
    "cudagraph_capture_sizes": hint(OWN_KERNELS),
    "attention_backend": hint(OWN_KERNELS),
    "optimization_level": hint(OWN_KERNELS),
    "performance_mode": hint(OWN_KERNELS),
    "disable_cascade_attn": hint(OWN_KERNELS),
    "enable_chunked_prefill": hint(OWN_SCHEDULE),
    "max_num_partial_prefills": hint(OWN_SCHEDULE),
    "max_long_partial_prefills": hint(OWN_SCHEDULE),
    "long_prefill_token_threshold": hint(OWN_SCHEDULE),
    "num_scheduler_steps": hint(OWN_SCHEDULE),
    "async_scheduling": hint(OWN_SCHEDULE),
    "stream_interval": only(1, reason="a stream brings every step"),
    "scheduling_policy": only("fcfs", reason="first come, first served; max_token_delay_s keeps long prompts short"),
    "disable_log_stats": hint(NOTHING_STORED),
    "aggregate_engine_logging": hint(ONE_DEVICE),
    "otlp_traces_endpoint": only(reason="there is no tracing: see /metrics"),
    "logprobs_mode": only("raw_logprobs", reason="log-probabilities are the model's own"),
    "max_logprobs": only(*range(101), reason="at most 100 log-probabilities are given for a token"),
    "enable_lora": only(False, reason=NO_LORA),
    "max_loras": hint(NO_LORA),
    "max_lora_rank": hint(NO_LORA),
    "limit_mm_per_prompt": hint(TEXT_ONLY),
    "mm_processor_kwargs": only({}, reason=TEXT_ONLY),
    "disable_chunked_mm_input": hint(TEXT_ONLY),
    "allowed_local_media_path": hint(TEXT_ONLY),
    "enable_prompt_embeds": only(False, reason="prompts are text or token ids"),
    "logits_processors": only([], reason="give callables to SamplingParams(logits_processors=...), for each request"),
    "enable_sleep_mode": only(False, reason="the engine keeps its memory"),
    "pooler_config": only(reason=NOT_POOLING),
    "kv_transfer_config": only(reason=ONE_DEVICE),
    "worker_cls": only("auto", reason=ONE_DEVICE),
}

# Flags of `paceline serve` alone.
SERVE: dict[str, Foreign] = {
    "response_role": only("assistant", reason="answers have the role 'assistant'"),
    "chat_template_content_format": only("auto", "string", reason="templates get each message's content as one text"),
    "enable_log_requests": hint("every request is one line of the log"),
    "disable_log_requests": hint("every request is one line of the log; prompts are left out without --log-prompts"),
    "max_log_len": hint("prompts are left out of the log, or written whole with --log-prompts"),
    "enable_auto_tool_choice": hint("calls are always read where tools are given"),
    "uvicorn_log_level": hint("use --log-level"),
    "disable_uvicorn_access_log": hint("there is no second access log"),
    "disable_frontend_multiprocessing": hint("the server is one process"),
    "api_server_count": only(1, reason="the server is one process"),
    "enable_request_id_headers": hint("every answer has x-request-id"),
    "return_tokens_as_token_ids": only(False, reason="tokens are given as text"),
    "trust_request_chat_template": only(False, reason="a client's template could keep the server busy"),
    "enable_tokenizer_info_endpoint": hint("/tokenizer_info is always there"),
    "enable_server_load_tracking": hint("/metrics has the load"),
    "enable_prompt_tokens_details": hint("usage always has them"),
    "allow_credentials": only(False, reason="keys are sent as a header, so pages need no credentials"),
    "allowed_methods": only(["*"], ["GET", "POST"], reason="pages may use GET and POST"),
    "allowed_headers": only(["*"], reason="pages may send any header"),
    "ssl_keyfile": only(reason="TLS is a proxy's work"),
    "ssl_certfile": only(reason="TLS is a proxy's work"),
    "root_path": only("", reason="routes are at the root; a proxy may cut a prefix off"),
    "middleware": only([], reason="no code is loaded into the server"),
    "lora_modules": only(reason=NO_LORA),
}

# Fields of `SamplingParams`: they exist, and hold only these values.
SAMPLING: dict[str, Foreign] = {
    "spaces_between_special_tokens": hint("no spaces are put between special tokens"),
    "flat_logprobs": only(False, reason="log-probabilities are a list of dictionaries, made when they are read"),
    "logprob_token_ids": only(reason="ask for logprobs=-1 and read the tokens you want"),
    "extra_args": only({}, reason="there are no plug-ins that read them; logits_processors are callables of a request"),
    "skip_clone": hint("options are copied once, whoever uses them how often"),
    "skip_reading_prefix_cache": only(False, reason="give the prompt a cache_salt of its own"),
    "thinking_token_budget": only(reason="use max_tokens, or a template that switches thinking off"),
    "repetition_detection": only(reason="use repetition_penalty or stop strings"),
}

# Fields of a request's body, beside those that request_bodies.UNSUPPORTED has.
REQUEST: dict[str, Foreign] = {
    "use_beam_search": only(False, reason="there is no beam search: ask for n samples"),
    "length_penalty": only(1.0, reason="it belongs to beam search"),
    "early_stopping": only(False, reason="it belongs to beam search"),
    "spaces_between_special_tokens": SAMPLING["spaces_between_special_tokens"],
    "truncate_prompt_tokens": only(reason="a prompt that is too long is refused: shorten it"),
    "chat_template": only(reason="a client's template could keep the server busy: start it with --chat-template FILE"),
    "documents": only([], reason="put them into a message"),
    "mm_processor_kwargs": only({}, reason=TEXT_ONLY),
    "prompt_embeds": only(reason="prompts are text or token ids"),
    "priority": only(0, reason="first come, first served"),
    "request_id": hint("the answer's own id and x-request-id name the request"),
    "return_tokens_as_token_ids": only(False, reason="tokens are given as text"),
    "return_token_ids": only(False, reason="use return_token_sources, which has each token's id"),
    "logits_processors": only([], reason="no code is loaded into the server"),
    "kv_transfer_params": only({}, reason=ONE_DEVICE),
    "vllm_xargs": only({}, reason="there are no plug-ins that read them"),
    "repetition_detection": SAMPLING["repetition_detection"],
    "thinking_token_budget": SAMPLING["thinking_token_budget"],
    "detokenize": only(True, reason="answers are text; return_token_sources adds the ids"),
    "echo": only(False, reason="only /v1/completions repeats its prompt"),
}

# Fields of a body that are known, of any shape that they may have, and that no answer depends on. A point leads inside.
UNREAD: dict[str, str] = {
    "user": LABEL,
    "metadata": LABEL,
    "safety_identifier": LABEL,
    "prompt_cache_key": LABEL,
    "response_format.json_schema.name": "a schema is held to by a grammar, which needs no name",
    "response_format.json_schema.description": "the model is not shown it: say it in a message; text.format: likewise",
    "response_format.json_schema.strict": "a schema is always held to",
    "messages.tool_calls.index": SENT_BACK,
    "input.id": SENT_BACK,
    "input.status": SENT_BACK,
    "input.content.type": "text is text, whoever wrote it",
    "input.content.annotations": SENT_BACK,
    "input.content.logprobs": SENT_BACK,
}

# Arguments of `generate` and `chat`.
CALL: dict[str, Foreign] = {
    "lora_request": only(reason=NO_LORA),
    "priority": only(0, [], reason="first come, first served"),
    "tokenization_kwargs": only({}, reason="tokenize the text yourself and give token ids"),
    "mm_processor_kwargs": only({}, reason=TEXT_ONLY),
    "chat_template_content_format": only("auto", "string", reason="templates get each message's content as one text"),
    "trace_headers": hint("there is no tracing"),
    "arrival_time": hint("a request arrives when it is submitted"),
    "data_parallel_rank": only(0, reason=ONE_DEVICE),
    "reset_running_requests": hint("the weights never change, so running requests keep their keys and values"),
    "reset_connector": hint("what kv_offload keeps is always forgotten too"),
}

# Keys of `speculative_config`.
SPECULATIVE: dict[str, Foreign] = {
    "draft_tensor_parallel_size": only(1, reason=ONE_DEVICE),
    "tensor_parallel_size": only(1, reason=ONE_DEVICE),
    "disable_padded_drafter_batch": hint(OWN_KERNELS),
    "enforce_eager": hint(OWN_KERNELS),
    "disable_logprobs": hint("log-probabilities of accepted tokens are given wherever they are asked for"),
    "max_model_len": hint("a drafter drafts as long as it has room"),
    "quantization": only(reason="a drafter has the precision of its file"),
    "revision": only("main", reason="give the folder of another revision"),
    "code_revision": only("main", reason="no code of a model is ever run"),
    "parallel_drafting": only(False, reason="a method drafts in one way: dflash fills a block at once"),
    "attention_backend": hint(OWN_KERNELS),
    "moe_backend": hint(OWN_KERNELS),
    "use_local_argmax_reduction": hint(OWN_KERNELS),
    "draft_load_config": hint(OWN_LOADING),
    "draft_sample_method": hint("use draft_sampling; answers follow the target's distribution in every case"),
    "num_speculative_tokens_per_batch_size": only(reason="the method 'auto' drafts what pays for each batch"),
    "synthetic_acceptance_rates": only(reason="use the method 'oracle', with an accuracy"),
    "synthetic_acceptance_length": only(reason="use the method 'oracle', with an accuracy"),
    "disable_by_batch_size": only(reason="the method 'auto' stops drafting where a batch makes it lose"),
    "speculative_token_tree": only(reason="use tree_widths, or node_budget and draft_width"),
}


def take_foreign(where: str, table: Mapping[str, Foreign], given: Mapping[str, Any]) -> None:
    """Refuse what is not known and what asks for something; say once what was accepted without effect."""
    for name in given:
        if name not in table:
            near = difflib.get_close_matches(name, table, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidOptionError(f"{where} takes no {name!r}.{hint} docs/from-vllm.md lists what it takes.")
    said = {name: value for name, value in given.items() if value is not None}
    for name, value in said.items():
        check_foreign(where, table, name, value)
    if said:
        logger.warning(
            "%s: accepted, and without effect: %s", where, "; ".join(f"{n} ({table[n].reason})" for n in said)
        )


def check_foreign(where: str, table: Mapping[str, Foreign], name: str, value: Any) -> None:
    if not table[name].accepts(value):
        raise InvalidOptionError(f"{where}: {name}={shown(value)} is not supported: {table[name].reason}")
