"""A verb's options from a file: what `--config FILE` names stands in front of the command line, which wins.

    {"port": 9000, "max_num_seqs": 32, "speculative_config": {"method": "suffix", "num_speculative_tokens": 8}}

The keys are the long options, with dashes or underscores; the file is JSON, or YAML by its name. Each entry becomes the
argument that a person would have typed, so types, choices and messages are the command line's own. A switch is true or
false, and has a `--no-` twin with which the command line takes it back. Options that may be repeated add up; a word
about speculation on the command line replaces the file's.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import InvalidOptionError

SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")
NOT_IN_FILES = ("config", "name")  # name: the positional twin of model
SECRET = ("api_key", "admin_key")  # text only, for YAML reads 0123 as 83; never shown in an error


def expand(arguments: Sequence[str], add_arguments: Callable[[argparse.ArgumentParser], None]) -> list[str]:
    """The arguments of a verb with those of its `--config` file in front."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(list(arguments))[0].config
    if path is None:
        return list(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_arguments(parser)
    defaults = vars(parser.parse_known_args([])[0])
    switches = [action.dest for action in parser._actions if isinstance(action, argparse.BooleanOptionalAction)]
    defaults |= {name: False for name in switches if defaults[name] is None}  # neither on nor off until one says so
    given = read_config(path, {name: value for name, value in defaults.items() if name not in NOT_IN_FILES})
    said = vars(parser.parse_known_args(list(arguments))[0])
    if any(said.get(name) is not None for name in SPECULATION):
        given = {name: value for name, value in given.items() if name not in SPECULATION}
    return [*_as_arguments(given, defaults, path), *arguments]


def read_config(path: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Option -> value, every option known and said once."""
    from paceline.spec.config.options import refuse_unknown

    data = _load(Path(path))
    if not isinstance(data, Mapping):
        raise InvalidOptionError(f'{path} must hold options by name, such as {{"port": 8000}}; got {data!r}')
    options: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if isinstance(defaults.get(name.removeprefix("no_")), bool) and name not in defaults:  # a switch's other name
            name, value = name.removeprefix("no_"), not value if isinstance(value, bool) else value
        if name in options:
            raise InvalidOptionError(f"{path} says {name!r} twice, the second time as {str(key)!r}: keep one of them")
        options[name] = value
    refuse_unknown(options, list(defaults), path)
    return options


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"cannot read the configuration {path}: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return _load_yaml(path, text)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidOptionError(f"{path} is not JSON: {error}. A YAML file must end in .yaml or .yml") from error


def _load_yaml(path: Path, text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise InvalidOptionError(
            f"{path} is YAML, which needs PyYAML: pip install pyyaml, or write the file as JSON"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidOptionError(f"{path} is not YAML: {error}") from error


def _as_arguments(given: Mapping[str, Any], defaults: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(defaults[name], bool):
            if not isinstance(value, bool):
                raise InvalidOptionError(f"{name!r} in {path} is a switch: true or false, got {value!r}")
            yield f"--{flag}" if value else f"--no-{flag}"
        elif value is not None or name in SECRET:  # a key left empty by mistake must not open the server
            for word in _words(name, value, isinstance(defaults[name], list), path):
                yield f"--{flag}={word}"


def _words(name: str, value: Any, repeatable: bool, path: str) -> Iterator[str]:
    """What a person would have typed for the value, which must be of a type that says so without doubt."""
    if isinstance(value, list) and not repeatable:
        raise InvalidOptionError(f"{name!r} in {path} takes one value, got {value!r}")
    allowed = (str,) if name in SECRET else (str, int) if repeatable else (str, int, float)
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Mapping) and (name.endswith("_config") or name in ("hf_overrides", "limit_mm_per_prompt")):
            yield json.dumps(item)
        elif isinstance(item, allowed) and not isinstance(item, bool):
            yield str(item)
        elif name in SECRET:
            got = "nothing" if item is None else f"a value of type {type(item).__name__}"
            raise InvalidOptionError(f"{name!r} in {path} takes text: put it in quotes; got {got}")
        else:
            raise InvalidOptionError(f"{name!r} in {path} takes a value, as text or a number; got {item!r}")
