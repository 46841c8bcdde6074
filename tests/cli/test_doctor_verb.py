"""`paceline doctor` on a toy model: what it says, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from paceline.cli import doctor, doctor_profile, doctor_threads
from paceline.cli.main import main
from paceline.core.model_config import ModelConfig
from paceline.models.layout import expected_shapes
from paceline.models.loader import LoadedModel
from paceline.models.native import NativeDecoder
from paceline.ops import native

CONFIG = ModelConfig("llama", 64, 32, 48, 2, 2, 1, 16, 512, 1e-5, 10000.0, tie_word_embeddings=True)


def toy() -> LoadedModel:
    weights = {name: 0.1 * torch.ones(shape) for name, shape in expected_shapes(CONFIG).items()}
    decoder = NativeDecoder(CONFIG, weights, num_threads=1)
    return LoadedModel("toy", None, CONFIG, decoder, None, "native")  # type: ignore[arg-type]


def test_without_a_model_only_the_machine_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "measure_bandwidth", lambda threads: 1e9 * threads)
    assert main(["doctor", "--no-model", "--json", "--num-threads", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["usable_cores"] >= 1 and "model" not in report
    if native.available():
        assert report["kernels"]["bandwidth"] == 2e9
        assert report["kernels"]["instruction_set"] in native.INSTRUCTION_SETS


def test_without_native_kernels_it_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", lambda: (None, "no compiler was there"))
    assert main(["doctor", "--no-model"]) == 0
    assert "no compiler was there" in capsys.readouterr().out


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_pass_costs_are_measured_for_every_width() -> None:
    costs = doctor.pass_costs(toy(), {"bandwidth": 1e9}, context=5, repeats=2)
    assert [row["rows"] for row in costs["passes"]] == list(doctor.ROWS)
    assert all(row["best_s"] <= row["median_s"] for row in costs["passes"])
    assert costs["limit_s"] == costs["weight_bytes"] / 1e9


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
@pytest.mark.parametrize(("promised", "line"), [(True, "bits      promised"), (False, "bits      not promised")])
def test_it_says_whether_bits_are_promised(
    promised: bool, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy()
    monkeypatch.setattr(model.decoder, "batch_invariant", promised)
    monkeypatch.setattr("paceline.models.loader.load_model", lambda name, **options: model)
    monkeypatch.setattr(native, "measure_bandwidth", lambda threads: 1e9)
    assert main(["doctor", "--context", "5", "--repeats", "1"]) == 0
    assert line in capsys.readouterr().out


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_a_profile_has_every_product_and_every_step(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.models.loader.load_model", lambda name, **options: toy())
    monkeypatch.setattr(native, "measure_bandwidth", lambda threads: 1e9)
    monkeypatch.setattr(doctor_profile, "ROWS", (1, 8))
    arguments = ["doctor", "--profile", "--context", "5", "--repeats", "1"]
    assert main([*arguments, "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    assert [(p["kinds"], p["rows"]) for p in profile["products"]] == [
        (kinds, rows) for kinds in doctor_profile.KINDS.values() for rows in (1, 8)
    ]
    assert [entry["rows"] for entry in profile["steps"]] == [1, 8]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "unpacking" in printed and "gate_up" in printed and "waiting" in printed


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_decoding_is_shown_by_context_and_by_how_threads_wait(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.models.loader.load_model", lambda name, **options: toy())
    monkeypatch.setattr(native, "measure_bandwidth", lambda threads: 1e9)
    monkeypatch.setattr(doctor_threads, "PASSES", 2)
    arguments = ["doctor", "--context", "5", "--repeats", "1", "--contexts", "16", "300", "--threads"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    short, long = report["contexts"]
    assert (short["context"], long["context"]) == (16, 300)
    kv_bytes = 2 * CONFIG.num_layers * CONFIG.num_kv_heads * CONFIG.head_dim * 4
    assert long["limit_s"] - short["limit_s"] == pytest.approx(284 * kv_bytes / 1e9)
    assert {entry["way"] for entry in report["threads"]} == {"auto", "spin", "sleep"}
    assert all(entry["beside"]["mean_s"] > 0 for entry in report["threads"])
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "limit tok/s" in printed and "beside a busy process" in printed


def test_a_context_beyond_the_model_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.models.loader.load_model", lambda name, **options: toy())
    monkeypatch.setattr(native, "measure_bandwidth", lambda threads: 1e9)
    assert main(["doctor", "--context", "5", "--repeats", "1", "--contexts", "512"]) == 2
    assert "from 1 to 511" in capsys.readouterr().err


@pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))
def test_the_timed_chain_is_the_pass_that_verifies_a_draft() -> None:
    decoder = toy().decoder
    batch = doctor.chain_pass(5, 20, 3, CONFIG.vocab_size)
    committed = replace(
        batch,
        context_lens=batch.positions + 1,
        parents=torch.full_like(batch.parents, -1),
        is_node=batch.is_node & False,
    )
    shape = (CONFIG.num_layers, 2, 48, CONFIG.num_kv_heads, CONFIG.head_dim)
    caches = torch.zeros(shape), torch.zeros(shape)
    chain = decoder.forward(batch, caches[0]).logits
    assert torch.equal(chain, decoder.forward(committed, caches[1]).logits)


def test_a_nonsensical_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--context", "0"]) == 2
    assert "--context" in capsys.readouterr().err
