"""GGUF files: every family and storage type gives the model that was written, and broken files are named."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.core.weights import QuantizedTensor
from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.config import model_config
from paceline.models.convert import convert_gguf
from paceline.models.decoder import Decoder
from paceline.models.dequantize import dequantize
from paceline.models.gguf_file import GgufFile
from paceline.models.gguf_names import QUANTIZED_TYPES
from paceline.models.loading import load_weights
from tests.forward_batches import Pool, Rows
from tests.models.small_gguf import BLOCK_CONFIG, write_model
from tests.models.small_models import VARIANTS, hf_model, run, small_decoder, tokens

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def logits(decoder: Decoder) -> torch.Tensor:
    pool = Pool(1, 24)
    prompt = tokens(decoder.config, 24)
    return run(decoder, pool.batch(Rows(0, 0, prompt)), pool.num_slots)


def decoder_of(file: GgufFile, *, keep_quantized: bool = False) -> Decoder:
    weights = load_weights(file.path, file.config(), keep_quantized=keep_quantized)
    return Decoder(file.config(), weights, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "llama-biases", "mistral", "qwen2", "qwen3"])
def test_a_family_computes_what_the_original_does(variant: str, tmp_path: Path) -> None:
    hf = hf_model(variant)
    write_model(tmp_path / "m.gguf", hf)
    found = logits(decoder_of(GgufFile(tmp_path / "m.gguf")))
    torch.testing.assert_close(found, logits(small_decoder(hf)), atol=1e-5, rtol=1e-5)


GEMMA3_LAYERS = {
    "num_hidden_layers": 7,
    "layer_types": [*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
}
SHORT_FACTORS = np.array(VARIANTS["phi3-longrope"][1]["rope_parameters"]["short_factor"], dtype=np.float32)


@pytest.mark.parametrize(
    "variant, changes, fields",
    [
        ("gemma3", GEMMA3_LAYERS | {"query_pre_attn_scalar": 16}, {"{arch}.attention.sliding_window": 5}),
        ("phi3", {}, {"{arch}.attention.sliding_window": 0}),
        ("phi3-window", {}, {"{arch}.attention.sliding_window": 6}),
        (
            "phi3-longrope",
            {},
            {
                "rope_factors_short.weight": SHORT_FACTORS,
                "rope_factors_long.weight": 4 * SHORT_FACTORS,
                "{arch}.rope.scaling.original_context_length": 128,
            },
        ),
        ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, {}),
    ],
)
def test_a_family_with_parts_of_its_own_computes_what_the_original_does(
    variant: str, changes: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    hf = hf_model(variant, **changes)
    write_model(tmp_path / "m.gguf", hf, extra=fields)
    found = logits(decoder_of(GgufFile(tmp_path / "m.gguf")))
    torch.testing.assert_close(found, logits(small_decoder(hf)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", *QUANTIZED_TYPES])
def test_every_storage_type(kind: str, tmp_path: Path) -> None:
    """Widened weights are close to the written ones, and blocks kept as they are widen to the same numbers."""
    hf = hf_model("llama", **BLOCK_CONFIG)
    write_model(tmp_path / "m.gguf", hf, kind)
    file = GgufFile(tmp_path / "m.gguf")
    wide, kept = file.weights(), file.weights(keep_quantized=True)
    original = dict(hf.named_parameters())[Q_PROJ].detach()
    tensor, blocks = wide[Q_PROJ], kept[Q_PROJ]
    assert isinstance(tensor, torch.Tensor) and tensor.shape == original.shape
    if kind in QUANTIZED_TYPES:
        assert isinstance(blocks, QuantizedTensor) and (blocks.kind, blocks.shape) == (kind, (256, 256))
        assert torch.equal(dequantize(blocks), tensor)
    if not kind.endswith("_K"):  # those blocks are random
        step = {"F16": 2**-11, "BF16": 2**-8, "Q8_0": 2**-7}.get(kind, 2**-3)  # of the largest of a block
        assert (tensor.float() - original).abs().max() < step * original.abs().max()
        assert (tensor.float() - original).abs().max() > 0
    torch.testing.assert_close(logits(decoder_of(file)), logits(decoder_of(file, keep_quantized=True)))


def test_k_blocks_mean_what_the_format_says(tmp_path: Path) -> None:
    """One Q4_K block by hand: d = 0.5, dmin = 0.25, scales and minima of the first group 3 and 2, nibbles 0..15."""
    block = np.zeros(144, dtype=np.uint8)
    block[:4] = np.array([0.5, 0.25], dtype=np.float16).view(np.uint8)
    block[4], block[8] = 3, 2  # scale, minimum of values 0..31
    block[16:48] = np.arange(32) % 16  # low nibbles
    wide = dequantize(QuantizedTensor(torch.from_numpy(block)[None], "Q4_K", (1, 256)))
    expected = 0.5 * 3 * (torch.arange(32) % 16) - 0.25 * 2
    assert torch.equal(wide[0, :32], expected)
    assert not wide[0, 32:].any()


def test_an_unknown_storage_type_is_refused_by_name(tmp_path: Path) -> None:
    writer_extra = {"odd.weight": np.zeros((4, 8), dtype=np.int8)}
    write_model(tmp_path / "m.gguf", hf_model("llama"), extra=writer_extra)
    with pytest.raises(UnsupportedModelError, match=r"odd\.weight is stored as I8.*Known: F32.*Q6_K"):
        GgufFile(tmp_path / "m.gguf").weights()


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", hf_model("llama"), extra={"odd.weight": np.zeros(8, dtype=np.float32)})
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelLoadError, match=r"odd\.weight, which this architecture does not use"):
        load_weights(path, GgufFile(path).config())


def llama3_factors(theta: float, factor: float, original: int = 8192) -> np.ndarray:
    """As converters write them: per pair of a head of 16, from wavelengths."""
    factors = []
    for i in range(8):
        wavelength = 2 * math.pi * theta ** (2 * i / 16)
        smooth = (original / wavelength - 1.0) / 3.0
        blend = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wavelength < original / 4 else factor if wavelength > original else blend)
    return np.array(factors, dtype=np.float32)


def test_llama3_factors_become_llama3_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 20000.0,
    }
    hf = hf_model("llama", rope_parameters=scaling, max_position_embeddings=16384)
    factors = llama3_factors(20000.0, 32.0)
    assert 1.0 in factors and 32.0 in factors
    write_model(tmp_path / "m.gguf", hf, extra={"rope_freqs.weight": factors})
    file = GgufFile(tmp_path / "m.gguf")
    assert file.config().rope_scaling.kind == "llama3" and file.config().rope_scaling.factor == 32.0
    torch.testing.assert_close(logits(decoder_of(file)), logits(small_decoder(hf)), atol=1e-5, rtol=1e-5)


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    factors = np.linspace(1, 3, 8, dtype=np.float32)
    write_model(tmp_path / "m.gguf", hf_model("llama"), extra={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModelError, match="not Llama 3's"):
        GgufFile(tmp_path / "m.gguf").config()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 2.0}, ("linear", 2.0, 256)),
        (
            {
                "{arch}.rope.scaling.type": "yarn",
                "{arch}.rope.scaling.factor": 4.0,
                "{arch}.rope.scaling.original_context_length": 64,
            },
            ("yarn", 4.0, 64),
        ),
        ({"{arch}.rope.scaling.type": "none"}, ("default", 1.0, 0)),
    ],
)
def test_rope_scaling_fields(fields: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", hf_model("llama"), extra=fields)
    scaling = GgufFile(tmp_path / "m.gguf").config().rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_max_position) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"{arch}.expert_count": 8}, "mixture of experts"),
        ({"{arch}.rope.dimension_count": 8}, "rotates 8 of 16"),
    ],
)
def test_what_we_cannot_run_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", hf_model("llama"), extra=fields)
    with pytest.raises(UnsupportedModelError, match=message):
        GgufFile(tmp_path / "m.gguf").config()


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*Known in GGUF files: llama, qwen2, qwen3"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0.0, 0.0001, 0.01, 0.5, 0.9999])
def test_a_truncated_file_is_named(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, hf_model("llama"))
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content))])
    with pytest.raises(ModelLoadError, match=r"m\.gguf is not a whole GGUF file.*fetch it again"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "does not begin with GGUF"),
        (4, "version"),
        (8, "ends at byte|unknown type"),
        (16, "ends at byte|unknown type"),
    ],
)
def test_a_corrupt_header_is_named(offset: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, hf_model("llama"))
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message):
        GgufFile(path)


def test_a_converted_folder_is_the_same_model(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", hf_model("qwen2", **BLOCK_CONFIG), "Q5_1", {"tokenizer.ggml.eot_token_id": 5})
    folder = tmp_path / "folder"
    folder.mkdir()
    convert_gguf(tmp_path / "m.gguf", folder)
    file = GgufFile(tmp_path / "m.gguf")
    assert model_config(folder) == file.config()
    assert file.config().eos_token_ids == (1, 5)
    folder_weights = load_weights(folder, file.config())
    for name, tensor in load_weights(tmp_path / "m.gguf", file.config()).items():
        assert isinstance(tensor, torch.Tensor) and torch.equal(tensor, folder_weights[name])
