"""Config, tokenizer and weights of a resolved model: a Hugging Face folder or a GGUF file, quantized or not."""

from pathlib import Path

from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, Weights
from paceline.models.aliases import SOURCE_FILE
from paceline.models.config import model_config, read_json
from paceline.models.family_weights import family_weights
from paceline.models.gguf_file import GgufFile
from paceline.models.hf import read_folder
from paceline.models.layout import check_shapes, expected_shapes
from paceline.models.quantized.config import quantization_scheme
from paceline.models.quantized.scheme import Scheme
from paceline.models.quantized.weights import quantized_weights
from paceline.models.tokenizer import Tokenizer


def load_config(path: Path) -> ModelConfig:
    return model_config(path) if path.is_dir() else GgufFile(path).config()


def load_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_folder(path) if path.is_dir() else Tokenizer.from_gguf(path)


def gguf_path(path: Path) -> Path | None:
    """The GGUF file that holds the weights, or that the folder was made from; None where there is none."""
    file = path / SOURCE_FILE if path.is_dir() else path
    return file if file.is_file() else None


def folder_scheme(path: Path) -> Scheme | None:
    """How a folder's weights are quantized; None for plain ones and for GGUF files."""
    config = path / "config.json"
    return quantization_scheme(read_json(config), str(config)) if path.is_dir() else None


def load_weights(
    path: Path, config: ModelConfig, *, keep_quantized: bool = False
) -> dict[str, Tensor | QuantizedTensor]:
    """The model's tensors, checked against its config. `keep_quantized` leaves quantized ones in blocks."""
    weights = read_weights(path, config, keep_quantized=keep_quantized)
    return {name: weights[name] for name in expected_shapes(config)}


def read_weights(path: Path, config: ModelConfig, *, keep_quantized: bool = False, for_cuda: bool = False) -> Weights:
    """The same, where possible each tensor only when it is asked for. `for_cuda`: in blocks of the fused kernels."""
    file = gguf_path(path)
    is_plain = path.is_dir() and not (keep_quantized and file) and (path / "model.safetensors").is_file()
    weights: Weights
    if file is None or is_plain:
        source = path
        weights = quantized_weights(
            read_folder(path), folder_scheme(path), config, keep=keep_quantized, for_cuda=for_cuda
        )
    else:
        source = file
        weights = GgufFile(file).weights(keep_quantized=keep_quantized)
    weights = family_weights(weights, config, is_gguf=source.suffix == ".gguf")
    check_shapes(weights, config, str(source))
    return weights
