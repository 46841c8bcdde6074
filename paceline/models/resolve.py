"""From what a user calls a model to a path on this machine.

| given            | example                        | becomes                                     |
|------------------|--------------------------------|---------------------------------------------|
| an alias         | `smollm2-135m`                 | a folder in the cache, fetched when missing |
| a model folder   | `./my-model`                   | itself                                      |
| a GGUF file      | `./model.Q4_K_M.gguf`          | itself                                      |
| a Hub id         | `Qwen/Qwen3-0.6B`              | a folder in huggingface_hub's cache         |
"""

import difflib
import re
from pathlib import Path

from paceline.errors import ModelLoadError
from paceline.models.aliases import ALIASES

HUB_ID = re.compile(r"[\w][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.jinja", "model*.safetensors", "tokenizer.model"]
HUB_IGNORED = ["*/*"]  # other formats live in folders of their own


def resolve_model(name: str, progress: bool = True) -> Path:
    """A folder with config.json, or a .gguf file."""
    if name in ALIASES:
        from paceline.models.fetch import fetch_alias  # rich, safetensors: only where something is fetched

        return fetch_alias(ALIASES[name], progress=progress)
    path = Path(name).expanduser()
    if name and path.is_dir():  # an empty name would mean the current folder
        return _folder(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ModelLoadError(f"{path} is a file, but not a .gguf one. {_accepted()}")
    if HUB_ID.fullmatch(name) and path.suffix.lower() != ".gguf":
        return _from_hub(name, progress)
    close = difflib.get_close_matches(name, ALIASES, n=1)
    raise ModelLoadError(
        f"there is no model {name!r}: no such file, folder or alias."
        f"{f' Did you mean {close[0]}?' if close else ''} {_accepted()}"
    )


def _folder(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"it has {len(files)} .gguf files: name one" if files else "it has neither config.json nor a .gguf file"
    raise ModelLoadError(f"the folder {path} is no model: {found}. {_accepted()}")


def _accepted() -> str:
    return (
        f"A model is an alias ({', '.join(ALIASES)}), a Hugging Face folder with config.json, a .gguf file, or a Hub "
        "id such as Qwen/Qwen3-0.6B."
    )


def _from_hub(name: str, progress: bool) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise ModelLoadError(
            f"{name!r} is no local path, so it would come from the Hugging Face Hub, for which the package "
            "huggingface_hub is missing: `pip install huggingface_hub`, or download the model and give its folder."
        ) from None
    if not progress:
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["pytorch_model*"], ignore_patterns=HUB_IGNORED)
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{name} is gated: accept its terms on the Hub, then log in with `hf auth login`. ({error})"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"the Hub has no model {name!r}, or you may not see it. {_accepted()}") from error
    except Exception as error:  # whatever the network can do
        raise ModelLoadError(
            f"{name!r} could not be fetched from the Hugging Face Hub ({type(error).__name__}: {error}). Check the "
            "network, or download the model elsewhere and give its folder."
        ) from error
    return _folder(folder)
