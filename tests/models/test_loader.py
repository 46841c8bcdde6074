"""load_model: what is chosen by default, what can be asked for, and what is refused."""

import importlib.util
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from paceline.core.forward import Decoder as AnyDecoder
from paceline.core.kv_tensor import FLOAT8
from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor
from paceline.errors import InvalidOptionError, ModelLoadError
from paceline.models import loader, memory
from paceline.models.convert import convert_gguf
from paceline.models.decoder import Decoder
from paceline.models.gguf_file import GgufFile
from paceline.models.layout import expected_shapes
from paceline.models.loader import load_model
from paceline.models.loading import load_config, load_weights
from paceline.models.memory import weight_bytes
from paceline.ops import native
from tests.forward_batches import Pool, Rows
from tests.models.small_gguf import BLOCK_CONFIG, write_model
from tests.models.small_models import hf_model, run, tokens


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loader") / "tiny.gguf"
    write_model(path, hf_model("llama", **BLOCK_CONFIG), "Q4_1")
    return path


def logits(decoder: AnyDecoder) -> torch.Tensor:
    pool = Pool(1, 16)
    return run(decoder, pool.batch(Rows(0, 0, tokens(decoder.config, 16))), pool.num_slots)  # type: ignore[arg-type]


def test_a_gguf_file_loads_whole(gguf_path: Path) -> None:
    model = load_model(str(gguf_path), device="cpu", quiet=True)
    assert (model.name, model.path) == (str(gguf_path), gguf_path)
    assert model.config == load_config(gguf_path) == model.decoder.config
    assert model.decoder.device.type == "cpu"
    is_quantized = GgufFile(gguf_path).is_quantized
    beside_blocks = torch.int16 if native.available() and native.instruction_set() == "avx512-vnni" else torch.float16
    assert model.decoder.dtype == (beside_blocks if is_quantized and native.available() else torch.float32)  # of its KV
    assert model.tokenizer.decode(model.tokenizer.encode("abab")) == "abab"


def test_native_and_torch_agree(gguf_path: Path) -> None:
    assert native.available(), native.unavailable_reason()
    fast = load_model(str(gguf_path), kernels="native", quantization=None)
    plain = load_model(str(gguf_path), kernels="torch")
    assert isinstance(plain.decoder, Decoder) and not isinstance(fast.decoder, Decoder)
    assert fast.decoder.batch_invariant and not plain.decoder.batch_invariant
    torch.testing.assert_close(logits(fast.decoder), logits(plain.decoder), atol=1e-4, rtol=1e-4)


def test_auto_computes_on_the_blocks_of_a_gguf_file_unless_a_dtype_is_asked_for(gguf_path: Path) -> None:
    assert "own blocks" in load_model(str(gguf_path), device="cpu").execution
    assert "float32" in load_model(str(gguf_path), device="cpu", dtype="float32").execution
    assert "PyTorch" in load_model(str(gguf_path), device="cpu", kernels="torch").execution


def test_torch_may_be_asked_to_be_batch_invariant(gguf_path: Path) -> None:
    assert load_model(str(gguf_path), kernels="torch", batch_invariant=True).decoder.batch_invariant


@dataclass
class OnCuda:
    """Stands in for a decoder on a GPU that this machine may not have."""

    config: ModelConfig
    weights: object
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool
    packs: bool
    kv_dtype: torch.dtype | None = None
    draws_tokens: bool = False
    hidden_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.hidden_dtype is None:  # not again where `replace` makes another one
            self.hidden_dtype, self.dtype = self.dtype, self.kv_dtype or self.dtype


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (10**12, 10**12))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(loader, "Decoder", OnCuda)

    def fused(decoder: OnCuda) -> tuple[OnCuda, object]:
        return replace(decoder, draws_tokens=True), object()

    monkeypatch.setattr(loader, "_fused", fused)
    return monkeypatch


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_cuda_is_batch_invariant_unless_told_not_to_be(dtype: str, gguf_path: Path, gpu: object) -> None:
    default = load_model(str(gguf_path), device="cuda", dtype=dtype)
    assert default.decoder.batch_invariant and default.execution.endswith(", batch-invariant")
    fast = load_model(str(gguf_path), device="cuda", dtype=dtype, batch_invariant=False)
    assert not fast.decoder.batch_invariant and "not batch-invariant: an answer may change" in fast.execution


def test_cuda_runs_captured_passes_of_the_fused_kernels_where_these_can_run(
    gguf_path: Path, tmp_path: Path, gpu: object
) -> None:
    default = load_model(str(gguf_path), device="cuda")
    assert default.capture is not None and default.decoder.draws_tokens and "fused" in default.execution
    for options in ({"batch_invariant": False}, {"kernels": "torch"}):
        other = load_model(str(gguf_path), device="cuda", **options)
        assert other.capture is None and not other.decoder.draws_tokens
    path = tmp_path / "large-heads.gguf"
    write_model(path, hf_model("llama", head_dim=320, hidden_size=48, num_attention_heads=2, num_key_value_heads=1))
    large = load_model(str(path), device="cuda")
    assert large.capture is None and large.decoder.batch_invariant, "the plain Triton kernels take them"


def test_cuda_keeps_the_blocks_of_a_quantized_file_where_asked_and_where_widened_ones_take_too_much(
    gguf_path: Path, gpu: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    wide = load_model(str(gguf_path), device="cuda")
    assert not wide.decoder.packs and isinstance(wide.decoder.weights[name], torch.Tensor)
    kept = load_model(str(gguf_path), device="cuda", quantization="gguf")
    assert kept.decoder.packs and kept.decoder.dtype == torch.bfloat16 and "own blocks" in kept.execution
    assert isinstance(kept.decoder.weights[name], QuantizedTensor)
    widened = sum(math.prod(shape) for shape in expected_shapes(wide.config).values()) * 2
    with gpu.context() as small:
        small.setattr(torch.cuda, "mem_get_info", lambda *args: (2 * widened - 2, 2 * widened))
        small.setattr(memory, "PACKED_BYTES", 0.1)  # of a file that is mostly its tokenizer
        assert load_model(str(gguf_path), device="cuda").decoder.packs
    again = load_model(str(gguf_path), device="cuda", quantization="int8")
    assert again.decoder.packs and again.decoder.weights[name].kind == "Q8_0" and "int8" in again.execution
    for options in ({"dtype": "bfloat16"}, {"quantization": None}, {"kernels": "torch"}, {"batch_invariant": False}):
        plain = load_model(str(gguf_path), device="cuda", **options)
        assert not plain.decoder.packs and isinstance(plain.decoder.weights[name], torch.Tensor)
    with pytest.raises(InvalidOptionError, match="'gguf' needs the native CPU kernels, or on CUDA the fused ones"):
        load_model(str(gguf_path), device="cuda", quantization="gguf", kernels="torch")


@pytest.mark.parametrize("asked", ["fp8", "fp8_e4m3"])
def test_keys_and_values_in_fp8_are_of_the_fused_kernels_and_refused_by_name_elsewhere(
    asked: str, tmp_path: Path, gpu: pytest.MonkeyPatch
) -> None:
    path, small = tmp_path / "heads-of-32.gguf", tmp_path / "heads-of-16.gguf"
    write_model(path, hf_model("llama", head_dim=32, hidden_size=64, num_attention_heads=2, num_key_value_heads=1))
    write_model(small, hf_model("llama", head_dim=16, hidden_size=64, num_attention_heads=2, num_key_value_heads=1))
    found = load_model(str(path), device="cuda", kv_cache_dtype=asked)
    assert found.decoder.dtype == FLOAT8 and "bfloat16, fp8 keys and values" in found.execution
    assert load_model(str(path), device="cuda").decoder.dtype == torch.bfloat16
    for options in ({"batch_invariant": False}, {"kernels": "torch"}):
        with pytest.raises(InvalidOptionError, match="run on other kernels"):
            load_model(str(path), device="cuda", kv_cache_dtype=asked, **options)
    with pytest.raises(InvalidOptionError, match="heads of 16 numbers are smaller than 32"):
        load_model(str(small), device="cuda", kv_cache_dtype=asked)
    with pytest.raises(InvalidOptionError, match="'int8' is what the native CPU kernels have"):
        load_model(str(path), device="cuda", kv_cache_dtype="int8")
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(InvalidOptionError, match=r"older than compute capability 8\.9"):
        load_model(str(path), device="cuda", kv_cache_dtype=asked)


def test_keys_and_values_in_fp8_run_on_pytorch_on_a_cpu_and_not_on_the_native_kernels(gguf_path: Path) -> None:
    found = load_model(str(gguf_path), device="cpu", kernels="torch", kv_cache_dtype="fp8")
    assert found.decoder.dtype == FLOAT8 and "float32, fp8 keys and values" in found.execution
    if native.available():
        with pytest.raises(InvalidOptionError, match="native CPU kernels run here"):
            load_model(str(gguf_path), device="cpu", kv_cache_dtype="fp8")


def test_too_little_memory_of_a_gpu_is_seen_before_loading(gguf_path: Path, gpu: pytest.MonkeyPatch) -> None:
    """Packed weights, and the embedding beside them."""
    config = load_config(gguf_path)
    embedding = 2 * config.vocab_size * config.hidden_size
    packed = weight_bytes(gguf_path, config, torch.bfloat16, "gguf")
    gpu.setattr(torch.cuda, "mem_get_info", lambda *args: (packed + embedding, 10**12))
    load_model(str(gguf_path), device="cuda")
    gpu.setattr(torch.cuda, "mem_get_info", lambda *args: (packed + embedding - 1, 10**12))
    with pytest.raises(ModelLoadError, match=r"takes about 0\.\d GB of GPU memory"):
        load_model(str(gguf_path), device="cuda")


@pytest.mark.parametrize("lacks", ["the package triton", "compute capability 8.0", "heads of 8 numbers"])
def test_cuda_without_triton_kernels_says_so_and_runs_on_pytorchs(
    lacks: str, gguf_path: Path, tmp_path: Path, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_path
    if "triton" in lacks:
        gpu.setattr(importlib.util, "find_spec", lambda name: None)
    elif "capability" in lacks:
        gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    else:
        path = tmp_path / "small-heads.gguf"
        write_model(path, hf_model("llama", head_dim=8, hidden_size=48))
    with caplog.at_level(logging.WARNING, "paceline"):
        assert not load_model(str(path), device="cuda").decoder.batch_invariant
    assert lacks in caplog.text
    with pytest.raises(InvalidOptionError, match=lacks):
        load_model(str(path), device="cuda", batch_invariant=True)


def test_execution_says_whether_bits_are_promised(gguf_path: Path) -> None:
    assert load_model(str(gguf_path), device="cpu").execution.endswith(", batch-invariant")
    assert "not batch-invariant" in load_model(str(gguf_path), device="cpu", kernels="torch").execution


def test_without_native_kernels_torch_takes_over_and_says_so(
    gguf_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "they were not built")
    with caplog.at_level(logging.WARNING, "paceline"):
        assert isinstance(load_model(str(gguf_path), device="cpu").decoder, Decoder)
    assert "without the native kernels: they were not built" in caplog.text
    with pytest.raises(InvalidOptionError, match="they were not built"):
        load_model(str(gguf_path), device="cpu", kernels="native")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run_on_a_cpu(dtype: str, gguf_path: Path) -> None:
    model = load_model(str(gguf_path), device="cpu", dtype=dtype, kernels="torch")
    assert model.decoder.dtype == getattr(torch, dtype)
    assert logits(model.decoder).isfinite().all()


def test_threads_reach_torch(gguf_path: Path) -> None:
    load_model(str(gguf_path), kernels="torch", num_threads=2)  # the one_thread fixture puts it back
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype must be auto, float32, bfloat16, float16, half, float, but is 'float8'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, but is 'tpu'"),
        ({"kernels": "magic"}, "kernels must be one of auto, native, torch, but is 'magic'"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        ({"kernels": "torch", "quantization": "int8"}, "'int8' needs the native CPU kernels"),
        ({"quantization": "int3"}, "int3"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str, gguf_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        load_model(str(gguf_path), **{"device": "cpu"} | options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_refused(gguf_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="PyTorch sees no CUDA device"):
        load_model(str(gguf_path), device="cuda")


def test_a_converted_folder_gives_its_blocks_back(gguf_path: Path, tmp_path: Path) -> None:
    """`source.gguf` beside the widened weights is where the 4-bit path finds its blocks."""
    convert_gguf(gguf_path, tmp_path)
    config = load_config(tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    assert isinstance(load_weights(tmp_path, config, keep_quantized=True)[name], torch.Tensor)  # no source: as stored
    (tmp_path / "source.gguf").write_bytes(gguf_path.read_bytes())
    kept = load_weights(tmp_path, config, keep_quantized=True)[name]
    assert isinstance(kept, QuantizedTensor) and kept.kind == "Q4_1"
    assert isinstance(load_weights(tmp_path, config)[name], torch.Tensor)


def test_gguf_quantization_runs_on_the_blocks(gguf_path: Path) -> None:
    blocks, wide = load_model(str(gguf_path), quantization="gguf"), load_model(str(gguf_path), quantization=None)
    difference = (logits(blocks.decoder) - logits(wide.decoder)).abs().max()
    assert 0 < difference < 0.1 * logits(wide.decoder).abs().max()  # int8 activations round a little
