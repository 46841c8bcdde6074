"""One model in several formats, each with several drafters: what `paceline bench quantization` runs.

A format is a model as it is given and how it is held: `folder`, `smollm2-135m@float32`, `smollm2-135m@int8`, or any of
these with a name of its own: `awq=folder`.

>>> parse_format("full=smollm2-135m@float32")
Format(name='full', model='smollm2-135m', options={'dtype': 'float32', 'quantization': None})
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.bench.run.backend import Sampling
from paceline.bench.run.grid import Grid, Setting, parse_setting
from paceline.bench.run.load import Load
from paceline.errors import InvalidOptionError
from paceline.spec.config.speculative_config import SpeculativeConfig

NO_DRAFTER = "none"
DRAFTERS = (NO_DRAFTER, "ngram", "eagle3", "auto")
DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("int8", "gguf", "checkpoint")
BY_PRICE = " by price"  # behind a drafter's name: it drafts as much as pays, and not its default size
DRAFTER_SIZES = ("default", "price")


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)  # of LLM


def parse_format(text: str) -> Format:
    name, separator, model = text.partition("=")
    if not separator or not name or "/" in name:
        name, model = "", text
    path, _, held = model.rpartition("@")
    if path and held in (*DTYPES, *QUANTIZATIONS):
        options = {"dtype": held, "quantization": None} if held in DTYPES else {"quantization": held}
        return Format(name or f"{_short(path)}@{held}", path, options)
    if not model:
        raise InvalidOptionError(f"{text!r} names no model: give MODEL, MODEL@float32, MODEL@int8 or NAME=MODEL")
    return Format(name or _short(model), model)


def parse_drafters(texts: Sequence[str], sizes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Name -> speculative_config, of drafters as users write them: `ngram`, `ngram:4`, `NAME={"method": ...}`.

    One without a size drafts its default size, so that tokens per pass can be compared between formats, or as much as
    pays, or both in turn (`sizes`).

    >>> list(parse_drafters(["ngram", "suffix:8", "auto"], ["default", "price"]))
    ['none', 'ngram', 'ngram by price', 'suffix:8', 'auto']"""
    found: dict[str, dict[str, Any]] = {NO_DRAFTER: {"method": "none"}}
    for text in dict.fromkeys(texts):
        name, separator, config_text = text.partition("=")
        is_named = bool(separator) and config_text.lstrip().startswith("{") and not text.lstrip().startswith("{")
        config = parse_setting(config_text if is_named else text).config if text != NO_DRAFTER else None
        if config is None:
            continue
        name = name if is_named else text
        parsed = SpeculativeConfig.parse(config)
        assert parsed is not None
        if not parsed.sized_by_price:
            found[name] = config
            continue
        if "default" in sizes:
            found[name] = config | {"num_speculative_tokens": parsed.num_speculative_tokens}
        if "price" in sizes:
            found[name + BY_PRICE] = config
    return found


def _short(model: str) -> str:
    return Path(model).name or model


@dataclass(frozen=True, slots=True)
class FormatPlan:
    formats: Sequence[Format]  # the first is the reference
    drafters: Mapping[str, Mapping[str, dict[str, Any]]]  # format -> the drafters that work on it, `none` among them
    users: Sequence[int]
    drafter_users: Sequence[int]  # where drafters are measured too
    workload: str
    num_rounds: int
    sampling: Sampling
    num_requests: int | None = None

    def grids(self) -> list[Grid]:
        """Where drafters are measured, a format's runs stand together; else formats stand side by side."""
        plain_only = [users for users in self.users if users not in self.drafter_users]
        every = [self._setting(form, drafter) for form in self.formats for drafter in self.drafters[form.name]]
        plain = [self._setting(form, NO_DRAFTER) for form in self.formats]
        grids = [self._grid(every, self.drafter_users)]
        return grids + ([self._grid(plain, plain_only)] if plain_only else [])

    def _setting(self, form: Format, drafter: str) -> Setting:
        return Setting(setting_name(form.name, drafter), self.drafters[form.name][drafter], form=form.name)

    def _grid(self, settings: list[Setting], users: Sequence[int]) -> Grid:
        loads = [Load(concurrency=count) for count in users]
        models = ", ".join(f"{form.name}: {form.model}" for form in self.formats)
        rounds, requests = self.num_rounds, self.num_requests
        return Grid(settings, [self.workload], [0.0], loads, rounds, self.sampling, requests, models)


def setting_name(form: str, drafter: str) -> str:
    return f"{form}, {drafter}"


def check_formats(formats: Sequence[Format]) -> None:
    names = [form.name for form in formats]
    if len(formats) < 2:
        raise InvalidOptionError("a comparison needs two formats or more: the reference first, then the others")
    if len(set(names)) < len(names):
        raise InvalidOptionError(f"two formats have one name: {', '.join(names)}. Name them: NAME=MODEL")
