"""What benchmarks/gpu_kernels.py measures on: random models of two real shapes, passes, and a clock for CUDA graphs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.forward import ForwardBatch
from paceline.core.model_config import ModelConfig
from paceline.models.decoder import Decoder
from paceline.models.layout import expected_shapes

BLOCK_SIZE = 16
SHAPES = {
    # hidden, intermediate, layers, heads, kv heads, head dim, vocab, qkv bias
    "135m": (576, 1536, 30, 9, 3, 64, 49152, False),
    "1.5b": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "tiny": (48, 80, 2, 6, 2, 16, 96, True),
}


def model_config(name: str) -> ModelConfig:
    hidden, intermediate, layers, heads, kv_heads, dim, vocab, bias = SHAPES[name]
    return ModelConfig(
        family="qwen2" if bias else "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        max_position=4096,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        tie_word_embeddings=True,
        qkv_bias=bias,
    )


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights that keep the residual stream near 1, so that errors are those of a real model."""
    generator = torch.Generator(device=device).manual_seed(7)
    weights = {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        wide = 1.0 + 0.1 * noise if "norm" in name else noise * (0.5 / shape[-1] ** 0.5)
        weights[name] = (wide if "embed" not in name else noise).to(dtype)
    return weights


@dataclass(frozen=True)
class Room:
    """A KV cache whose contexts are filled with noise, and block tables in a scrambled order."""

    kv: Tensor
    tables: Tensor  # [requests, blocks] int32

    @staticmethod
    def make(decoder: Decoder, num_requests: int, tokens_each: int) -> "Room":
        config, device = decoder.config, decoder.device
        blocks_each = -(-tokens_each // BLOCK_SIZE)
        order = torch.randperm(num_requests * blocks_each, generator=torch.Generator().manual_seed(1))
        slots = num_requests * blocks_each * BLOCK_SIZE
        shape = (config.num_layers, 2, slots, config.num_kv_heads, config.head_dim)
        generator = torch.Generator(device=device).manual_seed(2)
        kv = torch.empty(shape, dtype=decoder.dtype, device=device)
        for layer in kv:
            layer.copy_(torch.randn(layer.shape, generator=generator, device=device))
        return Room(kv, order.view(num_requests, blocks_each).int().to(device))


def decode_pass(
    room: Room, vocab: int, num_requests: int, rows_each: int, context: int, *, as_chunk: bool = False
) -> ForwardBatch:
    """The last of `context` tokens of each request, then a chain of draft nodes; or as a chunk of plain tokens."""
    device = room.kv.device
    request = torch.arange(num_requests).repeat_interleave(rows_each)
    place = torch.arange(rows_each).repeat(num_requests)  # 0: the committed row, then nodes
    row = torch.arange(num_requests * rows_each)
    position = context - 1 + place
    tables = room.tables.cpu().long()
    slot = tables[request, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
    node = (place > 0) & (not as_chunk)

    def ints(values: Tensor) -> Tensor:
        return values.to(dtype=torch.int32, device=device)

    return ForwardBatch(
        token_ids=ints((request * 7919 + place * 104729 + 17) % vocab),
        positions=ints(position),
        slot_mapping=ints(slot),
        context_lens=ints(torch.where(node, context, position + 1)),
        parents=ints(torch.where(node & (place > 1), row - 1, -1)),
        is_node=node.to(device),
        req_ids=ints(request),
        block_tables=room.tables[:num_requests].contiguous(),
        cu_query=ints(torch.arange(num_requests + 1) * rows_each),
        logits_rows=ints(row),
        block_size=BLOCK_SIZE,
    )


@dataclass(frozen=True)
class Clock:
    """Milliseconds of a launch sequence: as a replayed CUDA graph, or by the wall clock where there is no GPU."""

    device: torch.device
    replays: int = 50
    rounds: int = 5

    def time_ms(self, launch: Callable[[], None]) -> float:
        if self.device.type != "cuda":
            begin = time.perf_counter()
            launch()
            return (time.perf_counter() - begin) * 1e3
        graph = capture(launch)
        return self.replay_ms(graph)

    def replay_ms(self, graph: "torch.cuda.CUDAGraph") -> float:
        graph.replay()
        torch.cuda.synchronize()
        times = []
        for _ in range(self.rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(self.replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / self.replays)
        return statistics.median(times)


def capture(launch: Callable[[], None]) -> "torch.cuda.CUDAGraph":
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and takes memory, before the capture
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that a copy of 2 GiB moves, reads and writes counted."""
    if device.type != "cuda":
        return 1e10
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    took_ms = Clock(device, replays=10).time_ms(copy)
    return 2 * source.numel() / took_ms * 1e3
