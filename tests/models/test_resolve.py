"""What a model may be called, and what is said about anything else."""

import sys
from pathlib import Path

import pytest

from paceline.errors import ModelLoadError
from paceline.models.aliases import ALIASES, cache_dir
from paceline.models.resolve import resolve_model


def test_a_folder_a_file_and_a_folder_with_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").touch()
    assert resolve_model(str(folder)) == folder
    (tmp_path / "a.gguf").touch()
    assert resolve_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.gguf").touch()
    assert resolve_model("~/a.gguf") == tmp_path / "a.gguf"


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"neither config\.json nor a \.gguf file\. A model is an alias"):
        resolve_model(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files: name one"):
        resolve_model(str(tmp_path))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelLoadError, match=r"notes\.txt is a file, but not a \.gguf one"):
        resolve_model(str(tmp_path / "notes.txt"))


@pytest.mark.parametrize("name", ["no-such-model", "./nowhere", "/no/such/file.gguf", "missing/file.gguf", ""])
def test_the_error_for_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"no such file, folder or alias.*{next(iter(ALIASES))}"):
        resolve_model(name)


def test_the_error_for_a_misspelled_name_suggests_the_right_one() -> None:
    with pytest.raises(ModelLoadError, match=r"Did you mean smollm2-135m\?"):
        resolve_model("smollm-135m")


def test_without_its_package_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="pip install huggingface_hub"):
        resolve_model("some-org/some-model")


def test_without_a_network_the_hub_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **options: object) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelLoadError, match=r"could not be fetched.*no route to host.*give its folder"):
        resolve_model("some-org/some-model")


def test_what_is_taken_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors where there are any, else the old format; never both."""
    import huggingface_hub

    asked: list[list[str]] = []

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "org/model"
        asked.append(allow_patterns)
        (tmp_path / "config.json").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/model") == tmp_path
    assert "model*.safetensors" in asked[0] and asked[1] == ["pytorch_model*"]
    (tmp_path / "model.safetensors").touch()
    asked.clear()
    resolve_model("org/model")
    assert len(asked) == 1


def test_the_cache_moves_with_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "paceline"
    monkeypatch.setenv("PACELINE_CACHE", "/elsewhere")
    assert cache_dir() == Path("/elsewhere")
