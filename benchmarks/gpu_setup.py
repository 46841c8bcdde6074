"""What benchmarks/gpu.py measures with: the model, prompts as token ids, one run of a batch, and the limits."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.bench.workloads.loaders import load_file
from paceline.core.model_config import ModelConfig
from paceline.core.packing import RequestRows, pack
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.layout import expected_shapes
from paceline.models.loader import LoadedModel, load_model
from paceline.models.loading import load_tokenizer
from paceline.models.padded_decoder import PaddedDecoder, PassClock
from paceline.models.plain_passes import DrawingDecoder, PlainPasses
from paceline.models.resolve import resolve_model
from paceline.models.static_inputs import PassRoom
from paceline.spec.feature.captured_drafts import DRAFT_CLOCK

MAX_PROMPT = 1024  # tokens
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def load(
    name: str,
    device: str,
    dtype: str,
    *,
    tiny: bool,
    batch_invariant: bool | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    if not tiny:
        return load_model(
            name,
            device=device,
            dtype=dtype,
            quiet=True,
            batch_invariant=batch_invariant,
            quantization=quantization,
        )
    path = resolve_model(name, progress=False)
    tokenizer = load_tokenizer(path)
    eos = next(iter(tokenizer.eos_token_ids))
    config = config_from_dict(TINY | {"vocab_size": tokenizer.vocab_size, "eos_token_id": eos, "bos_token_id": eos})
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config).items()}
    weights = {name: 1.0 + 0.1 * x if "norm" in name else 0.3 * x for name, x in noise.items()}
    drawing = DrawingDecoder(Decoder(config, weights))

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(drawing, PlainPasses(drawing), room)

    return LoadedModel(name, path, config, drawing, tokenizer, "tiny, plain passes", capture)


def prompt_ids(model: LoadedModel, path: Path, most_tokens: int) -> list[list[int]]:
    """The file's prompts through the model's chat template, those of at most `most_tokens`."""
    found: list[list[int]] = []
    for prompt in load_file(path):
        if model.tokenizer.has_chat_template:
            ids = model.tokenizer.chat_token_ids([{"role": "user", "content": prompt.text}])
        else:
            ids = model.tokenizer.encode(prompt.text)
        if len(ids) <= most_tokens:
            found.append(ids)
    return found


def make_llm(model: LoadedModel, method: str, args: Any, *, max_num_seqs: int, max_model_len: int) -> LLM:
    """`method`: a name, or with sizes, as in eagle3/15/6: nodes and depth."""
    method, *sizes = method.split("/")
    speculative: dict[str, Any] = {"method": method}
    speculative |= dict(zip(("node_budget", "num_speculative_tokens"), map(int, sizes), strict=False))
    if args.tiny and method in ("eagle3", "medusa"):
        speculative["model"] = "untrained"
    elif method in ("eagle3", "draft_model") and args.drafter:
        speculative["model"] = args.drafter
    return LLM(
        model,
        speculative,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_kv_blocks=min(200_000, max_num_seqs * (-(-max_model_len // 16) + 8)),
        enable_prefix_caching=False,  # a prompt that comes again is read again
    )


def clock_of(llm: LLM) -> PassClock:
    """Of the padded passes; an empty one where the model has none."""
    model = llm.engine.core.runner.model
    return model.clock if isinstance(model, PaddedDecoder) else PassClock()


@dataclass
class Run:
    outputs: list[list[int]]
    seconds: float
    num_steps: int
    parts: dict[str, float]  # seconds of the run by part of a step
    device_s: float
    num_prompt_tokens: int
    num_passes: int
    num_eager: int
    drafts: dict[str, float]  # seconds of captured drafts by part

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs))


def run_groups(llm: LLM, prompts: list[list[int]], batch: int, tokens: int, temperature: float) -> Run:
    """Groups of `batch` prompts, one group after another, each answered together."""
    core, clock = llm.engine.core, clock_of(llm)
    core.clock.reset()
    before = _figures(clock)
    drafts_before = asdict(DRAFT_CLOCK)
    outputs: list[list[int]] = []
    begin = time.perf_counter()
    for first in range(0, len(prompts), batch):
        group = prompts[first : first + batch]
        params = [
            SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=first + i)
            for i in range(len(group))
        ]
        answers = llm.generate([{"prompt_token_ids": ids} for ids in group], params)
        errors = [answer.error for answer in answers if answer.error is not None]
        if errors:
            raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
        outputs += [list(answer.outputs[0].token_ids) for answer in answers]
    seconds = time.perf_counter() - begin
    difference = (b - a for a, b in zip(before, _figures(clock), strict=True))
    write, launch, read, eager_s, device, passes, eager = difference
    phases = dict(core.clock.seconds)
    parts = {
        "schedule": phases.get("schedule", 0.0),
        "pack": phases.get("execute", 0.0) - write - launch - read - eager_s,
        "eager passes": eager_s,
        "copy": write,
        "launch": launch,
        "wait+read": read,
        "verify": phases.get("verify", 0.0),
        "commit": phases.get("commit", 0.0),
        "propose": phases.get("propose", 0.0),
    }
    parts["outside"] = seconds - sum(parts.values())
    num_prompt = sum(map(len, prompts))
    drafts = {name: value - drafts_before[name] for name, value in asdict(DRAFT_CLOCK).items()}
    return Run(outputs, seconds, core.clock.num_steps, parts, device, num_prompt, int(passes), int(eager), drafts)


def _figures(clock: PassClock) -> tuple[float, ...]:
    host = (clock.write_s, clock.launch_s, clock.read_s, clock.eager_s)
    return (*host, clock.device_s, clock.num_passes, clock.num_eager)


def weight_numbers(config: ModelConfig) -> int:
    """Numbers that a pass reads: all but an embedding that is not also the head."""
    products = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    return config.num_layers * products + config.vocab_size * config.hidden_size


def pass_limit_s(config: ModelConfig, itemsize: int, requests: int, context: float, bandwidth: float) -> float:
    keys = 2 * config.num_layers * requests * context * config.kv_size
    return (weight_numbers(config) + keys) * itemsize / bandwidth


def time_passes(llm: LLM, sizes: list[int], context: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a padded pass by size (each row a request of its own), with tokens alone and with logits."""
    decoder = llm.engine.core.runner.model
    assert isinstance(decoder, PaddedDecoder)
    from paceline.models.padded_decoder import PassKind

    room, found = decoder.room, {}
    blocks_each = -(-(context + 1) // room.block_size)
    for size in sizes:
        count = min(size, room.max_num_seqs)
        each = -(-size // count)
        entries = []
        for i in range(count):
            blocks = [
                (i * blocks_each + block) % (room.kv_cache.shape[2] // room.block_size) for block in range(blocks_each)
            ]
            entries.append(RequestRows(blocks, [5] * each, context - each, num_wanted=each))
        batch = pack(entries, room.block_size)
        cells = {}
        for label, kind in (("tokens", PassKind(False, ())), ("tokens and logits", PassKind(True, ()))):
            chosen = decoder.static_pass(size, kind)
            decoder._inputs.write(batch, size)
            cells[label] = _replay_ms(chosen.launch, decoder.device)
        found[str(size)] = cells
    return found


def _replay_ms(launch: Any, device: torch.device, count: int = 30) -> float:
    if device.type != "cuda":
        begin = time.perf_counter()
        launch()
        return (time.perf_counter() - begin) * 1e3
    launch()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count
