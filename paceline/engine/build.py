"""From a model's name to a running engine: load, size the KV pool, wire the parts together."""

import gc
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.kv_tensor import allocate_kv, touch
from paceline.engine.captured_speculation import where_captured
from paceline.engine.config import EngineConfig, ResolvedConfig, resolve_config
from paceline.engine.core import EngineCore
from paceline.engine.processor import Processor
from paceline.engine.scheduler import SchedulerConfig
from paceline.errors import InvalidOptionError
from paceline.kv.fingerprint import make_fingerprint
from paceline.kv.storage import kv_bytes_per_token
from paceline.models.learned_cache import facts_of
from paceline.models.loader import LoadedModel, load_model
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.static_inputs import PassRoom
from paceline.models.weights_digest import weights_digest
from paceline.spec.auto.default_members import CANNOT_BUILD
from paceline.spec.config.speculative_config import SpeculativeConfig
from paceline.spec.engine_parts import EngineParts
from paceline.spec.speculator import Speculator
from paceline.structured.compiler import Grammars
from paceline.verifiers import Verifier, make_verifier

logger = logging.getLogger("paceline")

# Past the context: four times the nodes of the largest draft that any method makes by itself.
CAPTURED_DRAFT_SLOTS = 256
FIRST_BYTES = 128 << 20  # of keys and values: what the first requests get (SmolLM2-135M: 5,600 tokens)
DEFAULT_SPECULATION = {"method": "auto"}  # when the user says nothing; {"method": "none"} is plain decoding


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything `LLM` and `AsyncLLM` hold."""

    core: EngineCore
    processor: Processor
    model: LoadedModel
    config: ResolvedConfig


def build_engine(
    model: str | LoadedModel,
    speculative_config: Mapping[str, Any] | SpeculativeConfig | None,
    engine_config: EngineConfig,
    *,
    seed: int | None = None,
    **model_options: Any,  # of models.loader.load_model
) -> Engine:
    given = DEFAULT_SPECULATION if speculative_config is None else speculative_config
    speculative = SpeculativeConfig.parse(given)  # before the model: a typo should not cost a load
    if isinstance(model, str):
        loaded = load_model(model, **model_options)
    else:
        _check_loaded(model, model_options)
        loaded = model
    may_fall_back = speculative_config is None
    if loaded.capture is not None:
        speculative, is_auto = where_captured(speculative)
        may_fall_back = may_fall_back or is_auto
    decoder = loaded.decoder
    config = resolve_config(
        engine_config, decoder.config, decoder.dtype, decoder.device, available_memory_bytes(decoder.device)
    )
    num_slots = config.num_kv_blocks * config.block_size
    kv_cache = allocate_kv(decoder.config, num_slots, decoder.dtype, decoder.device)
    first_slots = min(num_slots, FIRST_BYTES // kv_bytes_per_token(decoder.config, decoder.dtype))
    touch(kv_cache, slice(0, first_slots))
    captured = None if loaded.capture is None else loaded.capture(pass_room(config, kv_cache))
    decoder = captured or decoder
    services = EngineParts(
        vocab_size=decoder.config.vocab_size,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        num_slots=num_slots,
        first_slots=first_slots,
        device=decoder.device,
        decoder=decoder,
        kv_cache=kv_cache,
        tokenizer=loaded.tokenizer,
        max_num_seqs=config.max_num_seqs,
        facts=facts_of(loaded.path, loaded.decoder, loaded.execution),
    )
    # Where passes are captured only rounds pay, and those take their sizes by price already.
    speculator = make_speculator(speculative, services, may_fall_back=may_fall_back, by_price=captured is None)
    if captured is not None:
        prepare(captured, speculator.needs.hidden_layers)
        speculator.prepare()
        gc.collect()
        gc.freeze()  # what is there now stays: a collection that looks at all of it takes as long as a hundred passes
    grammars = Grammars(loaded.tokenizer, decoder.config.vocab_size)
    core = EngineCore(
        model=decoder,
        text_decoder=loaded.tokenizer,
        kv_cache=kv_cache,
        block_size=config.block_size,
        scheduler_config=SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens, config.max_token_delay_s),
        speculator=speculator,
        verifier=_verifier(speculative),
        enable_prefix_caching=config.enable_prefix_caching,
        grammars=grammars,
        fingerprint=lambda: make_fingerprint(loaded.decoder, weights_digest(loaded.path), config.block_size),
    )
    if config.kv_offload is not None:
        core.keep_blocks(config.kv_offload)
    processor = Processor(
        loaded.tokenizer,
        decoder.config.vocab_size,
        loaded.tokenizer.eos_token_ids,
        config.max_model_len,
        speculator.check_request,
        seed,
        grammars,
    )
    return Engine(core, processor, loaded, config)


def _check_loaded(model: LoadedModel, options: Mapping[str, Any]) -> None:
    """What is said of a model that is loaded already must be what was said then, or nothing."""
    for name, value in options.items():
        nothing = ("auto",) if name == "quantization" else ("auto", None)  # quantization=None says something
        if value not in (*nothing, model.loaded_with.get(name)):
            raise InvalidOptionError(
                f"{name}={value!r} comes too late for a model that is loaded: give it to load_model, or give LLM a name"
            )


def prepare(decoder: PaddedDecoder, hidden_layers: Sequence[int]) -> None:
    """Capture what decoding needs now, and not in the first requests: with hidden states for drafters, and without for
    steps in which none of them drafts."""
    begin_s = time.perf_counter()
    for wanted in {(), tuple(hidden_layers)}:
        decoder.prepare(wanted)
    logger.info("%d sizes of pass are ready, after %.1f s", len(decoder.sizes), time.perf_counter() - begin_s)


def pass_room(config: ResolvedConfig, kv_cache: Tensor) -> PassRoom:
    """For captured passes. A request's blocks also hold the nodes of its draft; longer tables are not captured."""
    num_slots = config.max_model_len + CAPTURED_DRAFT_SLOTS
    max_blocks = min(config.num_kv_blocks, -(-num_slots // config.block_size))
    return PassRoom(kv_cache, config.block_size, max_blocks, config.max_num_seqs, config.max_num_batched_tokens)


def make_speculator(
    config: SpeculativeConfig | None, services: EngineParts, *, may_fall_back: bool, by_price: bool = False
) -> Speculator:
    """`may_fall_back`: the user did not ask for this method, so where it cannot work the target decodes plainly."""
    try:
        return Speculator(config, services, by_price=by_price)
    except CANNOT_BUILD as error:
        if not may_fall_back or config is None:
            raise
        logger.warning("speculation is off: %r does not work here (%s)", config.method, error)
    return Speculator({"method": "none"}, services)


def _verifier(config: SpeculativeConfig | None) -> Verifier:
    return make_verifier() if config is None else make_verifier(config.rejection_sample_method, **config.rule_options)


def available_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
