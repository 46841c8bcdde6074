"""Packed weights kept on disk: the same bits as packing anew, never a wrong or half-written entry, never too many."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from paceline.core.forward import ForwardBatch
from paceline.core.kv_tensor import allocate_kv
from paceline.errors import InvalidOptionError
from paceline.models import loader, packed_cache
from paceline.models.loader import load_model
from paceline.models.native import NativeDecoder
from paceline.models.packed_cache import PackedEntry, packed_entry
from paceline.ops import native
from tests.forward_batches import Pool, Rows
from tests.models.small_gguf import BLOCK_CONFIG, write_model
from tests.models.small_models import hf_model

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.unavailable_reason()))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small quantized model with biases, an empty cache, and no model too small for it."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed_cache, "LEAST_SOURCE_BYTES", 0)
    path = tmp_path / "model.gguf"
    write_model(path, hf_model("qwen2", **BLOCK_CONFIG), "Q4_1")
    return path


def entries(model: Path) -> list[Path]:
    folder = model.parent / "cache" / "packed"
    return sorted(folder.iterdir()) if folder.exists() else []


def logits(model: Path) -> torch.Tensor:
    decoder = load_model(str(model), quiet=True).decoder
    config, pool = decoder.config, Pool(1, 32)
    cache = allocate_kv(config, pool.num_slots, decoder.dtype, decoder.device)
    batch: ForwardBatch = pool.batch(Rows(0, 0, [3, 1, 4, 1, 5]))
    return decoder.forward(batch, cache).logits


def test_a_second_load_maps_the_same_bits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = logits(model)
    assert len(entries(model)) == 1
    monkeypatch.setattr(loader, "read_weights", lambda *args, **options: pytest.fail("the model was read again"))
    assert torch.equal(logits(model), first)
    decoder = load_model(str(model), quiet=True).decoder
    assert isinstance(decoder, NativeDecoder)
    monkeypatch.undo()
    monkeypatch.setenv("PACELINE_PACKED_CACHE", "0")
    packed_anew = load_model(str(model), quiet=True).decoder
    assert isinstance(packed_anew, NativeDecoder) and decoder.weight_bytes == packed_anew.weight_bytes


def test_the_cache_can_be_switched_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_PACKED_CACHE", "0")
    logits(model)
    assert entries(model) == []


@pytest.mark.parametrize("limit", ["much", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_of_gigabytes_is_refused(
    limit: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_PACKED_CACHE", limit)
    with pytest.raises(InvalidOptionError, match="number of gigabytes"):
        load_model(str(model), quiet=True)


def test_a_small_model_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_SOURCE_BYTES", model.stat().st_size + 1)
    logits(model)
    assert entries(model) == []


def test_other_files_options_kernels_and_instruction_sets_are_other_entries(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[PackedEntry | None] = [packed_entry(model, dtype="float16"), packed_entry(model, dtype="float32")]
    monkeypatch.setattr(native, "instruction_set", lambda: "another")
    found.append(packed_entry(model, dtype="float16"))
    monkeypatch.setattr(packed_cache, "library_sha256", lambda: "rebuilt")
    found.append(packed_entry(model, dtype="float16"))
    os.utime(model, ns=(1, 1))
    found.append(packed_entry(model, dtype="float16"))
    assert len({entry.folder for entry in found if entry}) == 5


@pytest.mark.parametrize("damage", ["a bit", "cut short", "index", "index of another version"])
def test_a_damaged_entry_is_made_anew(damage: str, model: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = logits(model)
    (entry,) = entries(model)
    data, index = entry / "weights.bin", entry / "index.json"
    if damage == "a bit":
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    elif damage == "cut short":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "index":
        index.write_text("{")
    else:
        index.write_text(json.dumps(json.loads(index.read_text()) | {"version": 0}))
    assert torch.equal(logits(model), first)
    assert "damaged" in caplog.text and entries(model) == [entry]
    caplog.clear()
    assert torch.equal(logits(model), first)
    assert caplog.text == ""


def test_a_touched_entry_with_the_same_content_is_used(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = logits(model)
    os.utime(entries(model)[0] / "weights.bin")
    assert torch.equal(logits(model), first) and caplog.text == ""


def test_the_least_recently_used_entry_goes_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits(model)
    (old,) = entries(model)
    size = sum(file.stat().st_size for file in old.iterdir())
    monkeypatch.setenv("PACELINE_PACKED_CACHE", str(2.5 * size / 1e9))
    added = []
    for age in (30, 20):  # two more loads of other versions of the file
        os.utime(old if not added else added[-1], (time.time() - age, time.time() - age))
        os.utime(model, ns=(age, age))
        logits(model)
        added += [entry for entry in entries(model) if entry != old and entry not in added]
    assert entries(model) == sorted(added)


def test_what_a_killed_process_left_is_removed_later(model: Path) -> None:
    remains = model.parent / "cache" / "packed" / ".0-1.tmp"
    recent = remains.with_name(".1-2.tmp")
    for folder in (remains, recent):
        folder.mkdir(parents=True)
    os.utime(remains, (0, 0))
    logits(model)
    assert not remains.exists() and recent.exists()  # a recent one may still be written


def test_a_disk_that_cannot_be_written_does_not_stop_the_load(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (model.parent / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE", str(model.parent / "file"))
    assert logits(model).isfinite().all()
    assert "could not be kept" in caplog.text
