"""Fixtures of the model tests; the small models themselves are in small_models.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.models.tokenizer import Tokenizer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more, and the machine may be shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ours(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture(scope="module")
def from_transformers(smollm2: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(smollm2)
