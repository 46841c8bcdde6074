"""What an engine is when the caller says nothing."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.errors import InvalidOptionError
from paceline.models.loader import LoadedModel
from paceline.models.padded_decoder import PaddedDecoder
from paceline.models.plain_passes import DrawingDecoder, PlainPasses
from paceline.models.static_inputs import PassRoom
from tests.toy import ToyDecoder, ToyTokenizer

OPTIONS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_kv_blocks": 64, "block_size": 4}


def toy_model() -> LoadedModel:
    decoder, tokenizer = ToyDecoder(), ToyTokenizer()
    return LoadedModel("toy", Path("."), decoder.config, decoder, tokenizer, "toy")  # type: ignore[arg-type]


def captured(model: LoadedModel) -> LoadedModel:
    drawing = DrawingDecoder(model.decoder)

    def capture(room: PassRoom) -> PaddedDecoder:
        return PaddedDecoder(drawing, PlainPasses(drawing), room)

    return dataclasses.replace(model, capture=capture)


@pytest.mark.parametrize(("is_captured", "method"), [(False, "auto"), (True, "none")])
def test_speculation_is_the_default_where_no_pass_can_be_launched_ahead(is_captured: bool, method: str) -> None:
    model = captured(toy_model()) if is_captured else toy_model()
    llm = LLM(model, **OPTIONS)
    config = llm.engine.core.speculator.config
    assert config is not None and config.method == method


def test_every_pass_of_an_engine_has_a_captured_size() -> None:
    llm = LLM(captured(toy_model()), {"method": "none"}, **OPTIONS)
    model = llm.engine.core.runner.model
    assert isinstance(model, PaddedDecoder) and model.sizes[-1] >= 16


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "float16"),
        ("device", "cpu"),
        ("quantization", "int8"),
        ("batch_invariant", True),
        ("num_threads", 1),
        ("kernels", "torch"),
    ],
)
def test_options_of_loading_are_refused_once_the_model_is_loaded(name: str, value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"{name}=.*too late"):
        LLM(toy_model(), **OPTIONS, **{name: value})
    loaded = dataclasses.replace(toy_model(), loaded_with={name: value})
    LLM(loaded, {"method": "none"}, **OPTIONS, **{name: value})


def test_floating_point_cannot_be_asked_of_a_model_that_was_loaded_without_saying_so() -> None:
    loaded = dataclasses.replace(toy_model(), loaded_with={"quantization": "auto"})
    with pytest.raises(InvalidOptionError, match="quantization=None"):
        LLM(loaded, {"method": "none"}, **OPTIONS, quantization=None)
