"""A model in a quantized folder, made layer by layer in the memory of one layer.

Each layer is calibrated on what the layers before it, quantized already, make of the calibration text. Held-out text
goes through the layers twice, as they were and as they are now: at the end the two are compared.

>>> report = quantize_model(path, Path("out"), Recipe("awq"), calibration, held_out)     # doctest: +SKIP
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.agreement import Agreement, Passage
from paceline.core.model_config import ModelConfig
from paceline.core.weights import QuantizedTensor, Weights
from paceline.errors import InvalidOptionError, ModelLoadError
from paceline.models.family_weights import stored_linear, stored_norm
from paceline.models.gguf_file import GgufFile
from paceline.models.layout import EMBEDDING, FINAL_NORM, HEAD, expected_shapes, layer_prefix
from paceline.models.loading import folder_scheme, gguf_path, load_config, read_weights
from paceline.models.memory import available_bytes
from paceline.models.quantized.folder_writer import SHARD_BYTES, FolderWriter, as_stored, plain_dtype
from paceline.models.quantized.fp8 import Float8Linear
from paceline.models.quantized.layer_methods import QuantizedLayer, quantized_layer
from paceline.models.quantized.layer_pass import LayerPass
from paceline.models.quantized.linear import QuantizedLinear
from paceline.models.quantized.recipe import AnyLinear, Recipe, linear_shapes

LOGITS_ROWS = 64  # positions whose logits are held at a time
LAYER_COPIES = 6  # float32 weights of a layer as read, as changed, as widened, and between
INPUT_COPIES = 3  # of what the matrices multiply, while a layer is quantized


@dataclass(slots=True)
class Report:
    recipe: dict[str, Any]
    source_is_quantized: bool  # then it was widened first, and errors are those of the second rounding
    calibration: dict[str, Any] | None  # None: the method only rounds
    layer_errors: list[float]  # of each layer's own contribution on that text (or the held-out one), relative
    agreement: dict[str, Any]  # with the source, on held-out text
    bytes_stored: int
    bytes_as_float16: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def quantize_model(
    path: Path,  # folder or .gguf file
    out: Path,
    recipe: Recipe,
    calibration: Sequence[Passage],  # for methods that learn from it
    held_out: Sequence[Passage],
    told: Callable[[int, int, float], None] = lambda layer, total, error: None,
) -> Report:
    """Write the folder. `told`: after each layer, how many there are, and its error."""
    config = load_config(path)
    recipe = recipe.checked(config)
    if not recipe.needs_inputs:
        calibration = held_out  # nothing is learnt from it: it only shows the layers' errors
    for what, passages in (("held-out", held_out), ("calibration", calibration)):
        if not any(len(passage.token_ids) > 1 for passage in passages):
            raise InvalidOptionError(f"the {what} text is empty")
    _check_memory(config, [*calibration, *held_out])
    writer = FolderWriter(out)
    try:
        run = _Run(path, config, recipe, calibration, held_out, writer)
        report = run.run(told)
        writer.finish(path, recipe.quantization_config(), run.dtype, report.to_dict())
    except BaseException:
        writer.discard()
        raise
    return report


class _Run:
    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        recipe: Recipe,
        calibration: Sequence[Passage],
        held_out: Sequence[Passage],
        writer: FolderWriter,
    ) -> None:
        self.config, self.recipe, self.writer = config, recipe, writer
        self.calibration, self.held_out = calibration, held_out
        self.weights: Weights = read_weights(path, config)
        file = gguf_path(path)
        self.is_quantized = GgufFile(file).is_quantized if file else folder_scheme(path) is not None
        self.dtype = plain_dtype(self._plain(EMBEDDING))
        self.generator = torch.Generator().manual_seed(recipe.seed)

    @torch.no_grad()
    def run(self, told: Callable[[int, int, float], None]) -> Report:
        calibrated = LayerPass(self.config, _lengths(self.calibration))
        judged = LayerPass(self.config, _lengths(self.held_out))
        stored = self._write(EMBEDDING, self._plain(EMBEDDING))
        hidden = self._embed(stored, self.calibration)
        exact, made = self._embed(self._plain(EMBEDDING), self.held_out), self._embed(stored, self.held_out)
        errors = []
        for layer in range(self.config.num_layers):
            weights = self._layer(layer)
            inputs: dict[str, Tensor] = {}
            expected = calibrated.run(layer, weights, hidden, inputs)
            quantized = quantized_layer(self.recipe, self.config, weights, inputs, self.generator)
            inputs.clear()
            widened = self._write_layer(layer, quantized)
            after = calibrated.run(layer, widened, hidden)
            errors.append(_relative(after - expected, expected - hidden))
            hidden = after
            exact = judged.run(layer, weights, exact)
            made = hidden if self.calibration is self.held_out else judged.run(layer, widened, made)
            told(layer, self.config.num_layers, errors[-1])
        return self._report(errors, self._compare(exact, made, stored))

    def _plain(self, name: str) -> Tensor:
        tensor = self.weights[name]
        assert not isinstance(tensor, QuantizedTensor)  # read_weights widens unless told otherwise
        return tensor

    def _float(self, name: str) -> Tensor:
        return self._plain(name).float()

    def _layer(self, layer: int) -> dict[str, Tensor]:
        prefix = layer_prefix(layer)
        names = [name for name in expected_shapes(self.config) if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._float(name) for name in names}

    def _embed(self, embedding: Tensor, passages: Sequence[Passage]) -> Tensor:
        """[tokens, hidden]"""
        ids = torch.tensor([token for passage in passages for token in passage.token_ids])
        return embedding[ids].float() * self.config.embedding_scale

    def _write(self, name: str, tensor: Tensor) -> Tensor:
        """Returns what is meant by the stored tensor, float32."""
        is_norm = "norm" in name
        stored = as_stored(stored_norm(self.config, tensor) if is_norm else tensor, self.dtype)
        self.writer.add(name, stored)
        offset = stored_norm(self.config, torch.zeros(1)) if is_norm else torch.zeros(1)
        return stored.float() - offset

    def _write_layer(self, layer: int, made: QuantizedLayer) -> dict[str, Tensor]:
        """Returns the layer's weights as they are meant, float32."""
        prefix = layer_prefix(layer)
        plain = {name: self._write(prefix + name, tensor) for name, tensor in made.plain.items()}
        for name, linear in self._stored_linears(made).items():
            for part, tensor in self.recipe.pack(linear).items():
                self.writer.add(f"{prefix}{name}.{part}", tensor)
        return made.widened() | plain

    def _stored_linears(self, made: QuantizedLayer) -> dict[str, AnyLinear]:
        """By the name under which a folder of this family keeps them."""
        places: dict[str, list[AnyLinear]] = {}
        for name, linear in made.linears.items():  # in the order of their parts
            places.setdefault(stored_linear(self.config, name), []).append(linear)
        return {name: parts[0] if len(parts) == 1 else _joined(parts) for name, parts in places.items()}

    def _compare(self, exact: Tensor, made: Tensor, stored_embedding: Tensor) -> Agreement:
        """The next tokens' distributions, by the hidden states of both sides; final norm and head are written too."""
        norm, head = self._float(FINAL_NORM), self._float(EMBEDDING)
        last_norm, last_head = self._write(FINAL_NORM, norm), stored_embedding
        if not self.config.tie_word_embeddings:
            head, last_head = self._float(HEAD), self._write(HEAD, self._plain(HEAD))
        agreement = Agreement()
        next_ids = torch.cat([passage.next_ids() for passage in self.held_out])
        for begin in range(0, len(next_ids), LOGITS_ROWS):
            rows = slice(begin, begin + LOGITS_ROWS)
            reference, logits = (
                self._logits(exact[rows], norm, head),
                self._logits(made[rows], last_norm, last_head),
            )
            agreement.add(reference, logits, next_ids[rows])
        return agreement

    def _logits(self, hidden: Tensor, norm: Tensor, head: Tensor) -> Tensor:
        return F.rms_norm(hidden, norm.shape, norm, self.config.rms_norm_eps) @ head.T

    def _report(self, errors: list[float], agreement: Agreement) -> Report:
        num_tokens = sum(_lengths(self.calibration))
        num_weights = sum(torch.Size(shape).numel() for shape in expected_shapes(self.config).values())
        return Report(
            recipe=asdict(self.recipe),
            source_is_quantized=self.is_quantized,
            calibration={"passages": len(self.calibration), "tokens": num_tokens} if self.recipe.needs_inputs else None,
            layer_errors=errors,
            agreement=agreement.to_dict(),
            bytes_stored=self.writer.num_bytes,
            bytes_as_float16=2 * num_weights,
        )


def _joined(parts: Sequence[AnyLinear]) -> AnyLinear:
    integers = [part for part in parts if isinstance(part, QuantizedLinear)]
    floats = [part for part in parts if isinstance(part, Float8Linear)]
    return QuantizedLinear.joined(integers) if integers else Float8Linear.joined(floats)


def _lengths(passages: Sequence[Passage]) -> list[int]:
    return [len(passage.token_ids) for passage in passages]


def _relative(error: Tensor, whole: Tensor) -> float:
    return float(error.norm() / whole.norm().clamp(min=1e-12))


def _check_memory(config: ModelConfig, passages: Sequence[Passage]) -> None:
    """Raise where it will not fit; the weights are mapped or read one by one, so they do not count."""
    shapes, num_tokens = linear_shapes(config), sum(_lengths(passages))
    layer = sum(outputs * inputs for outputs, inputs in shapes.values())
    width = max(inputs for _, inputs in shapes.values())
    inputs = num_tokens * sum(inputs for _, inputs in shapes.values())
    floats = 4 * config.vocab_size * config.hidden_size + LAYER_COPIES * layer + 4 * width**2 + INPUT_COPIES * inputs
    needed, available = 4 * floats + SHARD_BYTES, available_bytes("cpu")
    if available is not None and needed > available:
        raise ModelLoadError(
            f"quantizing takes about {needed / 1e9:.1f} GB of memory, but {available / 1e9:.1f} GB are available. "
            "Close other programs, or calibrate on less text (--samples)"
        )
