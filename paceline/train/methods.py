"""The table of methods that can be trained, and how one is set up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.train.dflash import DFlashRecipe, DFlashSettings
from paceline.train.draft import DraftRecipe, DraftSettings
from paceline.train.eagle import EagleRecipe, EagleSettings
from paceline.train.eagle3 import Eagle3Recipe, Eagle3Settings
from paceline.train.medusa import MedusaRecipe, MedusaSettings
from paceline.train.recipe import DraftVocabulary, Recipe
from paceline.train.target import DenseTarget


@dataclass(frozen=True, slots=True)
class Method:
    recipe: Callable[[DenseTarget, DraftVocabulary, Any], Recipe]
    settings: type[Any]  # a frozen dataclass: what belongs to the method alone
    learning_rate: float
    summary: str


METHODS: dict[str, Method] = {
    "eagle3": Method(Eagle3Recipe, Eagle3Settings, 1e-3, "one layer over three fused hidden states of the target"),
    "eagle": Method(EagleRecipe, EagleSettings, 1e-3, "one layer that predicts the target's last hidden state"),
    "dflash": Method(DFlashRecipe, DFlashSettings, 1e-3, "a block of masks filled in at once"),
    "draft": Method(DraftRecipe, DraftSettings, 1e-3, "a small model made of a few of the target's layers"),
    "medusa": Method(MedusaRecipe, MedusaSettings, 1e-3, "heads on the target's last hidden state"),
}


def build_recipe(
    method: str, target: DenseTarget, vocabulary: DraftVocabulary, options: Mapping[str, Any] | None = None
) -> Recipe:
    """`options`: fields of the method's settings; the others keep their defaults."""
    row = METHODS[method]
    options = dict(options or {})
    known = [field.name for field in fields(row.settings)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise InvalidOptionError(f"{method} has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    return row.recipe(target, vocabulary, row.settings(**options))
