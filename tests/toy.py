"""A toy target whose logits are a function of exactly the tokens that a row attends to.

It writes each row's token and position into the KV cache and reads them back the way a real model reads keys: through
block tables, context lengths and tree parents. It then asserts that the positions found are 0, 1, 2, ... in order, so
every mistake in slots, masks, commits or prefix sharing either fails at once or changes the logits.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tokenizers
import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch, ForwardOutput, Target, TokenDraws
from paceline.core.kv_tensor import allocate_kv
from paceline.core.model_config import ModelConfig
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.engine.core import EngineCore
from paceline.engine.scheduler import SchedulerConfig
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.plain_passes import DrawingDecoder, PlainPasses
from paceline.models.static_inputs import PassRoom
from paceline.ops.random import Purpose, keyed_uniform, noise_key, race
from paceline.spec.engine_parts import EngineParts
from paceline.spec.speculator import Speculator
from paceline.verifiers import make_verifier

VOCAB = 24
EOS = VOCAB - 1


def drawn(logits: Tensor, draws: TokenDraws) -> list[int | None]:
    """The tokens that the host would draw; None where the logits have to say."""
    tokens: list[int | None] = []
    for row, temperature, seed, position in zip(
        logits.numpy(), draws.temperatures, draws.seeds.tolist(), draws.positions.tolist(), strict=True
    ):
        if not np.isfinite(row).all():
            tokens.append(None)
        elif temperature == 0.0:
            tokens.append(int(row.argmax()))
        else:
            uniform = keyed_uniform(noise_key(seed, position, Purpose.SAMPLE), len(row))
            tokens.append(race((row - row.max()) / temperature, uniform))
    return tokens


class ToyDecoder:
    config = ModelConfig(
        family="toy",
        vocab_size=VOCAB,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        max_position=256,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        eos_token_ids=(EOS,),
    )
    dtype = hidden_dtype = torch.float32
    device = torch.device("cpu")
    batch_invariant = True
    draws_tokens = True
    num_threads = None
    handle = None

    def __init__(self, sharpness: float = 3.0) -> None:
        self.sharpness = sharpness
        self.num_passes = 0
        self.seen: list[ForwardBatch] = []  # the last pass only

    def forward(
        self,
        batch: ForwardBatch,
        kv_cache: Tensor,
        *,
        hidden_layers: Sequence[int] = (),
        layers: Sequence[int] | None = None,
    ) -> ForwardOutput:
        self.num_passes += 1
        self.seen = [batch]
        slots = batch.slot_mapping.long()
        assert len(set(slots.tolist())) == batch.num_rows, "two rows write to one slot"
        kv_cache[0, 0, slots, 0, 0] = batch.token_ids.float()
        kv_cache[0, 1, slots, 0, 0] = batch.positions.float()
        logits = [self.logits(self._attended(batch, kv_cache, row)) for row in batch.logits_rows.tolist()]
        hidden = torch.zeros(batch.num_rows, len(hidden_layers), 1) if hidden_layers else None
        rows = torch.stack(logits) if logits else torch.zeros(0, VOCAB)
        return ForwardOutput(rows, hidden, None if batch.draws is None else drawn(rows, batch.draws))

    def vocabulary_rows(self, ids: Tensor, *, head: bool = False) -> Tensor:
        return ids[:, None].float() / VOCAB + 0.1

    def _attended(self, batch: ForwardBatch, kv_cache: Tensor, row: int) -> tuple[int, ...]:
        table = batch.block_tables[batch.req_ids[row]]
        index = torch.arange(int(batch.context_lens[row]))
        slots = (table[index // batch.block_size] * batch.block_size + index % batch.block_size).tolist()
        path: list[int] = []
        node = row if batch.is_node[row] else -1
        while node >= 0:
            path.append(int(batch.slot_mapping[node]))
            node = int(batch.parents[node])
        slots += path[::-1]
        positions = kv_cache[0, 1, slots, 0, 0].int().tolist()
        assert positions == list(range(int(batch.positions[row]) + 1)), f"row {row} attends to positions {positions}"
        return tuple(kv_cache[0, 0, slots, 0, 0].int().tolist())

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """What comes after `tokens`: random, but always the same, and EOS now and then."""
        return _toy_logits(tuple(tokens)) * self.sharpness


@functools.lru_cache(maxsize=100_000)
def _toy_logits(tokens: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.random.default_rng([len(tokens), *tokens]).normal(size=VOCAB)).float()


class ToyTokenizer:
    """Token i is the i-th letter; EOS has no text."""

    eos_token_ids = (EOS,)
    vocab_size = VOCAB
    has_chat_template = False

    def vocabulary(self) -> dict[str, int]:
        return {chr(ord("a") + token): token for token in range(VOCAB)}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids if token != EOS or not skip_special_tokens)

    def definition(self) -> str:
        letters = {chr(ord("a") + token): token for token in range(VOCAB - 1)} | {"<end>": EOS}
        made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens(["<end>"])
        return made.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)


def toy_core(
    speculative: dict[str, object] | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    prefix_caching: bool = True,
    sharpness: float = 3.0,
    max_token_delay_s: float | None = None,
    decoder: Target | None = None,  # another model with VOCAB tokens
    sizes: Sequence[int] | None = None,  # passes padded to these draw their tokens (models/plain_passes.py)
    capture: Callable[[PassRoom], PaddedDecoder] | None = None,  # as LoadedModel.capture
    by_price: bool = False,  # as Speculator's
) -> EngineCore:
    decoder = decoder or ToyDecoder(sharpness)
    kv_cache = allocate_kv(decoder.config, num_blocks * block_size, decoder.dtype, decoder.device)
    kv_cache.fill_(-1)  # a slot that nobody wrote has no position
    room = PassRoom(kv_cache, block_size, num_blocks, max_num_seqs)
    if capture is not None:
        decoder = capture(room)
    elif sizes is not None:
        drawing = DrawingDecoder(decoder)
        decoder = PaddedDecoder(drawing, PlainPasses(drawing), room, sizes)
    services = EngineParts(
        vocab_size=VOCAB,
        max_model_len=num_blocks * block_size,
        block_size=block_size,
        num_slots=num_blocks * block_size,
        device=decoder.device,
        decoder=decoder,
        kv_cache=kv_cache,
        tokenizer=ToyTokenizer(),
        max_num_seqs=max_num_seqs,
    )
    speculator = Speculator(speculative, services, by_price=by_price)
    speculator.prepare()
    return EngineCore(
        decoder,
        ToyTokenizer(),
        kv_cache,
        block_size,
        SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_token_delay_s),
        speculator,
        make_verifier("sample_match"),
        prefix_caching,
    )


def toy_request(
    request_id: str, prompt: Sequence[int], max_tokens: int = 16, seed: int = 0, **params: object
) -> Request:
    options = {"temperature": 0.0, "max_tokens": max_tokens, **params}
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**options),  # type: ignore[arg-type]
        max_tokens=max_tokens,
        seed=seed,
        eos_token_ids=(EOS,),
    )


def run_all(core: EngineCore, requests: Sequence[Request], check: bool = True) -> list[list[int]]:
    """Run to the end, with the integrity check after every step; the outputs in order."""
    for request in requests:
        core.add_request(request)
    for _ in range(10_000):
        if not core.has_requests:
            break
        core.step()
        if check:
            core.check_integrity()
    assert not core.has_requests, "the engine did not finish"
    assert core.kv.pool.num_free == core.kv.pool.num_blocks
    return [request.output_token_ids for request in requests]
