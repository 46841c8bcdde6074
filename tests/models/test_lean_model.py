"""A draft model in 4 bits, whatever its file has: what is rounded, how far, and what a second load finds."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.kv_tensor import allocate_kv
from paceline.core.sampling_params import SamplingParams
from paceline.core.weights import QuantizedTensor
from paceline.errors import InvalidOptionError
from paceline.llm import LLM
from paceline.models import packed_cache
from paceline.models.dequantize import dequantize
from paceline.models.drafters import lean_model
from paceline.models.drafters.lean_model import LeanWeights, load_lean_model, rounded
from paceline.models.layout import EMBEDDING, HEAD
from paceline.models.loader import LoadedModel
from paceline.models.loading import load_config, read_weights
from paceline.models.native import NativeDecoder
from paceline.ops import native
from tests.forward_batches import Pool, Rows
from tests.models.small_gguf import BLOCK_CONFIG, write_model
from tests.models.small_models import hf_model

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(params=["Q8_0", "Q4_1"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    write_model(path, hf_model("qwen2", **BLOCK_CONFIG), request.param)
    return path


def stored(model: Path) -> Any:
    return read_weights(model, load_config(model), keep_quantized=True)


def logits(loaded: LoadedModel) -> torch.Tensor:
    decoder, pool = loaded.decoder, Pool(1, 32)
    cache = allocate_kv(decoder.config, pool.num_slots, decoder.dtype, decoder.device)
    return decoder.forward(pool.batch(Rows(0, 0, [3, 1, 4, 1, 5])), cache).logits


def test_matrices_of_more_than_4_bits_are_rounded_and_no_others(model: Path) -> None:
    found, lean = stored(model), LeanWeights(stored(model), load_config(model))
    query, before = lean[QUERY], found[QUERY]
    assert isinstance(query, QuantizedTensor) and isinstance(before, QuantizedTensor) and query.kind == "Q4_1"
    if before.kind == "Q4_1":
        assert torch.equal(query.data, before.data)
    else:
        wide, narrow = dequantize(before), dequantize(query)
        parts = wide.view(wide.shape[0], -1, 32)
        step = (parts.amax(-1) - parts.amin(-1)).repeat_interleave(32, dim=1) / 15
        assert float((wide - narrow).abs().max()) > 0 and bool(((wide - narrow).abs() <= 0.51 * step + 1e-4).all())
    assert lean[EMBEDDING].shape == found[EMBEDDING].shape
    bias = QUERY.replace("weight", "bias")
    assert torch.equal(torch.as_tensor(lean[bias]), torch.as_tensor(found[bias]))


def test_a_large_matrix_is_rounded_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 64)
    whole = rounded(weight)
    monkeypatch.setattr(lean_model, "ROWS_AT_A_TIME", 16)
    parts = rounded(weight)
    assert isinstance(whole, QuantizedTensor) and isinstance(parts, QuantizedTensor)
    assert torch.equal(whole.data, parts.data) and parts.shape == (50, 64)
    assert rounded(weight[:, :40]).shape == (50, 40) and isinstance(rounded(weight[:, :40]), torch.Tensor)


def test_a_tied_head_becomes_a_matrix_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "tied.gguf"
    write_model(path, hf_model("qwen2", **BLOCK_CONFIG, tie_word_embeddings=True), "Q8_0")
    lean, config = LeanWeights(stored(path), load_config(path)), load_config(path)
    head = lean[HEAD]
    assert config.tie_word_embeddings and HEAD in list(lean) and len(lean) == len(list(lean))
    assert isinstance(head, QuantizedTensor) and head.kind == "Q4_1" and lean.shape(HEAD) == head.shape
    loaded = load_lean_model("tied", path, num_threads=1)
    assert logits(loaded).shape == (5, config.vocab_size)


def test_a_second_load_has_the_same_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_SOURCE_BYTES", 0)
    first = logits(load_lean_model("m", model, num_threads=1))
    monkeypatch.setattr(lean_model, "LeanWeights", None)  # it must not be needed
    assert torch.equal(first, logits(load_lean_model("m", model, num_threads=2)))


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=str)
@pytest.mark.parametrize("how", ["auto", "int4", "file"])
def test_drafts_change_no_answer_and_int4_drafts_in_4_bits(model: Path, how: str, params: dict[str, Any]) -> None:
    prompts: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": [9, 3, 9, 3, 9]}]
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **params)
    options = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3, "draft_quantization": how}
    drafting = LLM(str(model), options, num_threads=1)
    plain = LLM(str(model), {"method": "none"}, num_threads=1)
    answers = [[out.outputs[0].token_ids for out in llm.generate(prompts, sampling)] for llm in (plain, drafting)]
    assert answers[0] == answers[1]
    counts = drafting.stats()["speculation"]["draft_model"]
    if how != "int4":  # as the file has it, so it is the target itself, and never wrong: this model is small
        assert counts["num_accepted_tokens"] > 0 and counts["draft_acceptance_rate"] > 0.85
    assert counts["num_draft_tokens"] > 0


def test_what_the_native_kernels_cannot_run_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lean_model, "can_be_lean", lambda config: False)
    options = {"method": "draft_model", "model": str(model), "draft_quantization": "int4"}
    with pytest.raises(InvalidOptionError, match="native CPU kernels, which do not run"):
        LLM(str(model), options, num_threads=1)
    with pytest.raises(InvalidOptionError, match="draft_quantization must be one of auto, int4, file"):
        LLM(str(model), options | {"draft_quantization": "int3"}, num_threads=1)


def test_auto_drafts_a_large_model_in_4_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(lean_model, "LEAST_SOURCE_BYTES", 0)
    monkeypatch.setattr(
        lean_model,
        "load_lean_model",
        lambda *args, **options: loaded.append("4 bits") or load_lean_model(*args, **options),
    )
    LLM(str(model), {"method": "draft_model", "model": str(model)}, num_threads=1)
    assert loaded == ["4 bits"]
    LLM(str(model), {"method": "draft_model", "model": str(model), "draft_quantization": "file"}, num_threads=1)
    assert loaded == ["4 bits"]


def test_fewer_bytes_are_read(model: Path) -> None:
    from paceline.models.loader import load_model

    lean, whole = load_lean_model("m", model, num_threads=1).decoder, load_model(str(model), quiet=True).decoder
    assert isinstance(lean, NativeDecoder) and isinstance(whole, NativeDecoder)
    assert lean.weight_bytes <= whole.weight_bytes
