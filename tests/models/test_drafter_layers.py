"""The native layers and matrices of drafters against their plain twins."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.model_config import ModelConfig
from paceline.models.drafters.layers import Attention, DecoderLayer, Mlp, RMSNorm
from paceline.models.drafters.paged import KeyRows, TorchLayers
from paceline.models.rope import rope_frequencies
from paceline.ops.native.layers import NativeLayers, NativeLinear, layers_available, top_log_probs

pytestmark = pytest.mark.skipif(not layers_available(), reason="the native kernels are not built")

CONFIG = ModelConfig(
    family="llama",
    vocab_size=64,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position=256,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
)


class WideLayer(nn.Module):
    """As EAGLE-3's: attention reads twice the width of the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, input_size=2 * config.hidden_size)
        self.mlp = Mlp(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def rows(num_rows: int, positions: list[int], tails: list[list[int]], contexts: list[int]) -> KeyRows:
    """Two requests: even rows see slots 40, 41, ..., odd rows 80, 81, ...; rows are sorted by request."""
    begins = [0 if i < num_rows // 2 else 30 for i in range(num_rows)]
    lengths = [len(tail) for tail in tails]
    ints = [positions, list(range(num_rows)), begins, contexts, np.cumsum([0, *lengths])[:-1], lengths]
    flat = [slot for tail in tails for slot in tail]
    return KeyRows(
        *(np.asarray(part, dtype=np.int32) for part in ints),
        np.concatenate([np.arange(40, 70), np.arange(80, 110)]).astype(np.int32),
        np.asarray(flat, dtype=np.int32),
    )


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("storage", "tolerance"), [("float32", 1e-4), ("int8", 0.05), ("int4", 0.5)])
@pytest.mark.parametrize("wide", [False, True])
def test_layer_matches_its_twin(wide: bool, storage: str, tolerance: float, qk_norm: bool) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, qk_norm=qk_norm)
    modules: list[nn.Module] = [WideLayer(config) if wide else DecoderLayer(config) for _ in range(2)]
    weights = {f"{i}.{name}": value for i, module in enumerate(modules) for name, value in module.state_dict().items()}
    frequencies, scale = rope_frequencies(config)
    native = NativeLayers(config, weights, frequencies, scale, 128, num_threads=2, storage=storage)
    twin = TorchLayers(config, modules, 128, torch.device("cpu"))
    twin.kv_cache.normal_()
    native.kv_cache.copy_(twin.kv_cache)
    batch = rows(6, [3, 4, 5, 9, 10, 10], [[0], [0, 1], [0, 1, 2], [3], [4, 3], [5]], [3, 3, 3, 25, 9, 0])
    inputs, stream = torch.randn(6, config.hidden_size * (2 if wide else 1)), torch.randn(6, config.hidden_size)
    expected, found = twin.forward(1, inputs, stream, batch), native.forward(1, inputs, stream, batch)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(native.kv_cache, twin.kv_cache, rtol=tolerance, atol=tolerance)


def test_storing_writes_the_same_keys_as_a_whole_pass() -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [WideLayer(CONFIG) for _ in range(2)]
    weights = {f"{i}.{name}": value for i, module in enumerate(modules) for name, value in module.state_dict().items()}
    frequencies, scale = rope_frequencies(CONFIG)
    stored, whole = (NativeLayers(CONFIG, weights, frequencies, scale, 128, num_threads=1) for _ in range(2))
    batch = rows(4, [0, 1, 2, 3], [[0]] * 4, [0] * 4)
    inputs = torch.randn(4, 2 * CONFIG.hidden_size)
    stored.store(0, inputs, batch)
    whole.forward(0, inputs, torch.randn(4, CONFIG.hidden_size), batch)
    assert torch.equal(stored.kv_cache, whole.kv_cache)
    assert stored.kv_cache[0, :, :4].abs().min() > 0


@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_linear_matches_its_twin(num_rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(70, 101)
    x = torch.randn(num_rows, 70)
    native = NativeLinear(linear.weight, linear.bias, num_threads=2, storage="float32")
    torch.testing.assert_close(native(x), linear(x).detach(), rtol=1e-4, atol=1e-4)
    rough = NativeLinear(linear.weight, linear.bias, num_threads=2)
    torch.testing.assert_close(rough(x), linear(x).detach(), rtol=0.05, atol=0.05)


def test_four_bits_keep_what_they_can_hold() -> None:
    """Sixteen evenly spaced values per 32 weights are exactly what a block of nibbles holds."""
    torch.manual_seed(0)
    steps = torch.randint(0, 16, (40, 3, 32))
    steps[..., 0], steps[..., 1] = 0, 15
    weight = (0.25 * steps - 1.5).flatten(1)
    x = torch.randint(-5, 6, (3, 96)).float()
    x[:, ::32] = 127.0  # so that whole numbers are exact in int8
    native = NativeLinear(weight, None, num_threads=2, storage="int4")
    torch.testing.assert_close(native(x), x @ weight.T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("num_rows", "size", "k"), [(1, 5, 5), (3, 1000, 8), (9, 777, 1)])
def test_likeliest_tokens_match_their_twin(num_rows: int, size: int, k: int) -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(num_rows, size)
    logits[0, 1] = -torch.inf
    ids, found = top_log_probs(logits, k, num_threads=2)
    expected = logits.log_softmax(-1)
    best = expected.topk(k)
    assert torch.equal(ids.long(), best.indices)
    torch.testing.assert_close(found, best.values, rtol=1e-5, atol=1e-5)
