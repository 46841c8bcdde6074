"""A fingerprint changes with everything that changes the bits of keys and values, and says with what."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.core.kv_tensor import FLOAT8
from paceline.errors import InvalidRequestError
from paceline.kv.fingerprint import PARTS, Fingerprint, make_fingerprint, probe
from paceline.models.config import config_from_dict
from paceline.models.decoder import Decoder
from paceline.models.native import NativeDecoder
from paceline.models.weights_digest import weights_digest
from paceline.ops import native
from tests.models.small_models import hf_config_dict, random_weights

CONFIG = config_from_dict(hf_config_dict("llama"))
needs_native = pytest.mark.skipif(not native.available(), reason="no native kernels")


def decoder(**options: object) -> Decoder:
    return Decoder(CONFIG, random_weights(CONFIG), **{"dtype": torch.float32, "batch_invariant": True, **options})  # type: ignore[arg-type]


def test_the_same_model_has_the_same_fingerprint_and_survives_a_dictionary() -> None:
    one, two = (make_fingerprint(decoder(), "w", 4) for _ in range(2))
    assert one.differences(two) == [] and one.digest == two.digest and len(one.digest) == 16
    assert Fingerprint.from_dict(one.to_dict()).digest == one.digest


def test_what_differs_is_named() -> None:
    mine = make_fingerprint(decoder(), "w", 4)

    def differs(other: Fingerprint) -> list[str]:
        assert mine.digest != other.digest
        return mine.differences(other)

    assert differs(make_fingerprint(decoder(), "other", 4)) == ["weights"]
    assert differs(make_fingerprint(decoder(dtype=torch.bfloat16), "w", 4)) == ["kv dtype", "probe"]
    assert differs(make_fingerprint(decoder(kv_dtype=FLOAT8), "w", 4)) == ["kv dtype", "probe"]
    assert set(differs(make_fingerprint(decoder(), "w", 8))) == {"layout", "block size", "probe"}
    assert "kernels" in differs(make_fingerprint(decoder(batch_invariant=False), "w", 4))
    other = Decoder(
        replace(CONFIG, rms_norm_eps=1e-3), random_weights(CONFIG), dtype=torch.float32, batch_invariant=True
    )
    assert differs(make_fingerprint(other, "w", 4)) == ["config", "probe"]


def test_the_probe_sees_a_single_changed_weight_of_any_layer() -> None:
    weights = dict(random_weights(CONFIG))
    before = probe(decoder(), 4)
    for name in [name for name in weights if "layers.1" in name]:
        changed = dict(weights)
        tensor = torch.as_tensor(changed[name]).clone()
        tensor.view(-1)[0] += 0.5
        changed[name] = tensor
        assert probe(Decoder(CONFIG, changed, dtype=torch.float32, batch_invariant=True), 4) != before, name


@needs_native
def test_the_instruction_set_is_part_of_it(instruction_set: str) -> None:
    made = make_fingerprint(NativeDecoder(CONFIG, random_weights(CONFIG), num_threads=1), "w", 4)
    assert made.parts["instruction set"] == instruction_set and made.parts["kernels"].startswith("native ")
    more = make_fingerprint(NativeDecoder(CONFIG, random_weights(CONFIG), num_threads=2), "w", 4)
    assert made.digest == more.digest, "threads change no bit"


def test_what_is_no_fingerprint_is_refused() -> None:
    for parts in ({}, dict.fromkeys(PARTS, 1)):
        with pytest.raises(InvalidRequestError, match="no fingerprint"):
            Fingerprint.from_dict(parts)


def test_weights_are_told_apart_by_content_and_not_by_where_they_lie(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    assert weights_digest(one) == weights_digest(two) != ""
    (two / "model.safetensors").write_bytes(b"Weights")
    assert weights_digest(one) != weights_digest(two)
    assert weights_digest(tmp_path / "nowhere") == ""
