"""Every quantized format: stored numbers are understood, the native kernels keep to a bound, nothing else moves.

Bounds are on logits, relative to the largest: what the float32 path may differ from the meant weights (1e-5), and
what int8 activations may add on the native path, where the reference has float32 activations.
"""

import logging
from pathlib import Path

import pytest
import torch

from paceline.core.forward import Target
from paceline.core.kv_tensor import allocate_kv
from paceline.core.sampling_params import SamplingParams
from paceline.core.weights import QuantizedTensor
from paceline.llm import LLM
from paceline.models.decoder import Decoder
from paceline.models.dequantize import dequantize
from paceline.models.layout import HEAD
from paceline.models.loader import load_model, torch_decoder
from paceline.models.loading import read_weights
from paceline.models.native import NativeDecoder
from paceline.models.quantized import weights as quantized_weights
from paceline.ops import native
from paceline.ops.packed import PackedWeight
from tests.forward_batches import Pool, Rows
from tests.models.quantized.quantized_folder import is_linear, plain_config, write_folder
from tests.models.quantized.quantizers import AGAIN, EXACT, FORMATS, HALVES
from tests.models.small_models import tokens

NATIVE = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
# of the largest logit; int8 activations per 32, and float16 keys and values, on a random model of width 64
NATIVE_BOUND = {EXACT: 0.05, AGAIN: 0.07, HALVES: 0.003}


def logits(decoder: Target) -> torch.Tensor:
    config, pool = decoder.config, Pool(1, 24)
    batch = pool.batch(Rows(0, 0, tokens(config, 24)))
    return decoder.forward(batch, allocate_kv(config, pool.num_slots, decoder.dtype, decoder.device)).logits


def reference(meant: dict[str, torch.Tensor]) -> torch.Tensor:
    return logits(Decoder(plain_config(), meant))


@pytest.mark.parametrize("form", FORMATS)
def test_widened_weights_are_exactly_what_was_stored(form: str, tmp_path: Path) -> None:
    meant = write_folder(tmp_path, form)
    found = read_weights(tmp_path, plain_config())
    for name, weight in meant.items():
        widened = found[name]
        assert isinstance(widened, torch.Tensor)
        torch.testing.assert_close(widened.float(), weight, rtol=1e-6, atol=0)
    model = load_model(str(tmp_path), dtype="float32", device="cpu", kernels="torch", quiet=True)
    expected = reference(meant)
    assert (logits(model.decoder) - expected).abs().max() < 1e-5 * expected.abs().max()


@NATIVE
@pytest.mark.parametrize("form", FORMATS)
def test_native_blocks_hold_the_stored_values(form: str, tmp_path: Path) -> None:
    """Exactly where a block can; quantized again within half a step of int8; FP8 within the rounding of float16."""
    meant = write_folder(tmp_path, form)
    held = FORMATS[form][2]
    found = read_weights(tmp_path, plain_config(), keep_quantized=True)
    for name in filter(is_linear, meant):
        kept, weight = found[name], meant[name]
        wide = kept.float() if isinstance(kept, torch.Tensor) else dequantize(kept)
        if held == EXACT:
            assert torch.equal(wide, weight)
            continue
        step = weight.view(weight.shape[0], -1, 32).abs().amax(-1).repeat_interleave(32, 1) / 127
        bound = 0.51 * step if held == AGAIN else 2**-11 * weight.abs() + 2**-25
        assert ((wide - weight).abs() <= bound).all()


@pytest.mark.parametrize(("form", "is_int8"), [("awq", True), ("gptq", True), ("gptq-8", False)])
def test_the_plain_head_of_4_bit_layers_is_int8_on_the_native_kernels(
    form: str, is_int8: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_weights, "HEAD_ROWS", 40)  # in several parts
    head = write_folder(tmp_path, form)[HEAD]
    found = read_weights(tmp_path, plain_config(), keep_quantized=True)[HEAD]
    assert isinstance(found, QuantizedTensor) == is_int8
    if isinstance(found, QuantizedTensor):
        step = head.view(head.shape[0], -1, 32).abs().amax(-1).repeat_interleave(32, 1) / 127
        assert found.shape == head.shape and ((dequantize(found) - head).abs() <= 0.51 * step).all()
    for how in ({"keep_quantized": False}, {"keep_quantized": True, "for_cuda": True}):
        assert torch.equal(torch.as_tensor(read_weights(tmp_path, plain_config(), **how)[HEAD]), head)


@NATIVE
@pytest.mark.parametrize("form", FORMATS)
def test_native_logits_stay_within_their_bound(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meant = write_folder(tmp_path, form)
    held = FORMATS[form][2]
    with caplog.at_level(logging.WARNING):
        model = load_model(str(tmp_path), device="cpu", quiet=True)
    assert isinstance(model.decoder, NativeDecoder) and "own quantized values" in model.execution
    assert (held in caplog.text) == (held != EXACT)
    expected = reference(meant)
    worst = (logits(model.decoder) - expected).abs().max() / expected.abs().max()
    print(f"{form}: worst logit differs by {worst:.4f} of the largest")
    assert worst < NATIVE_BOUND[held]


# of the largest logit: zeros are exact, and scales that float16 does not hold are off by 2^-12 at most
PACKED_BOUND = 0.002


@pytest.mark.parametrize("form", FORMATS)
def test_weights_packed_for_cuda_stay_within_their_bound(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a plain decoder reads them, in float32; the fused kernels are compared with it in tests/ops."""
    meant = write_folder(tmp_path, form)
    device, is_permuted = torch.device("cpu"), "act-order" in form
    decoder = torch_decoder(tmp_path, plain_config(), torch.float32, device, "checkpoint", batch_invariant=False)
    assert ("plain weights, because groups of act-order are no runs" in caplog.text) == is_permuted
    for layer in decoder.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(linear.weight, PackedWeight) != is_permuted
    expected = reference(meant)
    worst = (logits(decoder) - expected).abs().max() / expected.abs().max()
    print(f"{form}: worst logit differs by {worst:.6f} of the largest")
    assert worst < PACKED_BOUND


@NATIVE
@pytest.mark.parametrize("form", ["awq", "gptq-8-asymmetric", "gptq-act-order", "w8a8", "fp8-block"])
def test_bits_do_not_depend_on_company(form: str, tmp_path: Path) -> None:
    write_folder(tmp_path, form)
    decoder = load_model(str(tmp_path), device="cpu", quiet=True).decoder
    config, pool = decoder.config, Pool(2, 24)
    prompts = [tokens(config, 20, seed=1), tokens(config, 13, seed=2)]
    cache = allocate_kv(config, pool.num_slots, decoder.dtype, decoder.device)
    together = decoder.forward(pool.batch(Rows(0, 0, prompts[0]), Rows(1, 0, prompts[1])), cache).logits
    alone = [decoder.forward(pool.batch(Rows(r, 0, prompts[r])), cache).logits for r in (0, 1)]
    assert torch.equal(together, torch.cat(alone))


def check_that_speculation_changes_no_token(form: str, tmp_path: Path, device: str) -> None:
    write_folder(tmp_path, form)
    answers = []
    for speculative in (None, {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}):
        llm = LLM(str(tmp_path), speculative, device=device)
        params = [SamplingParams(max_tokens=10, temperature=t, seed=3) for t in (0.0, 0.7)]
        outputs = llm.generate(["the cat sat on the cat sat on", "x y x y x y"], params)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1] and all(answers[0])


@NATIVE
@pytest.mark.parametrize("form", FORMATS)
def test_speculation_changes_no_token(form: str, tmp_path: Path) -> None:
    check_that_speculation_changes_no_token(form, tmp_path, "cpu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("form", ["awq", "gptq-8-asymmetric", "gptq-act-order", "w8a8", "fp8-block", "fp8-channel"])
def test_speculation_changes_no_token_on_cuda(form: str, tmp_path: Path) -> None:
    check_that_speculation_changes_no_token(form, tmp_path, "cuda")


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16", "fp8-channel"])
def test_fused_matrices_are_unpacked_before_they_are_cut(form: str, tmp_path: Path) -> None:
    """Phi-3 stores q, k and v as one quantized matrix."""
    from paceline.models.family_weights import family_weights
    from paceline.models.quantized.config import quantization_scheme
    from paceline.models.quantized.weights import quantized_weights
    from tests.models.quantized.quantized_folder import random_linear

    quantization, quantize, _ = FORMATS[form]
    config = plain_config("phi3")
    stored = quantize(random_linear(config.q_size + 2 * config.kv_size, config.hidden_size))
    prefix = "model.layers.0.self_attn."
    tensors = {f"{prefix}qkv_proj.{part}": tensor for part, tensor in stored.tensors.items()}
    scheme = quantization_scheme({"quantization_config": quantization})
    for keep in (False, True):
        found = family_weights(quantized_weights(tensors, scheme, config, keep=keep), config, is_gguf=False)
        parts = [found[f"{prefix}{part}_proj.weight"] for part in "qkv"]
        wide = [part.float() if isinstance(part, torch.Tensor) else dequantize(part) for part in parts]
        torch.testing.assert_close(torch.cat(wide), stored.meant, rtol=1e-3, atol=1e-6)


@NATIVE
def test_int8_may_be_asked_for_instead(tmp_path: Path) -> None:
    meant = write_folder(tmp_path, "fp8")
    model = load_model(str(tmp_path), device="cpu", quantization="int8", quiet=True)
    expected = reference(meant)
    assert "int8 weights" in model.execution
    assert (logits(model.decoder) - expected).abs().max() < 0.04 * expected.abs().max()
