"""Prompt files in the forms that circulate, recognized by their keys.

    Spec-Bench   JSONL: {"question_id": 1, "category": "writing", "turns": ["...", "..."]}
    HumanEval    JSONL: {"task_id": "HumanEval/0", "prompt": "def f(...):", "canonical_solution": "..."}
    ShareGPT     one JSON list: [{"id": "...", "conversations": [{"from": "human", "value": "..."}, ...]}, ...]
    plain        JSONL: {"prompt": "..."} with optional "id", "category", "chat"

Of a conversation the first human turn is taken. A line that fits none of these is an error that names the line.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import InvalidOptionError

if TYPE_CHECKING:
    from paceline.bench.workloads.workload import Prompt


def load_file(path: Path) -> "list[Prompt]":
    prompts = [_prompt(entry, where, path) for where, entry in _entries(path)]
    if not prompts:
        raise InvalidOptionError(f"{path} holds no prompt")
    return prompts


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, the decoded entry), from JSONL or from one JSON list."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"cannot read the workload {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except json.JSONDecodeError as error:
            raise InvalidOptionError(f"{path} begins like a JSON list but is not one: {error}") from error
        yield from ((f"entry {i}", entry) for i, entry in enumerate(entries, 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidOptionError(f"{path}, line {number} is not JSON: {error}") from error


def _prompt(entry: Any, where: str, path: Path) -> "Prompt":
    from paceline.bench.workloads.workload import Prompt

    if not isinstance(entry, Mapping):
        raise InvalidOptionError(f"{path}, {where} must be a JSON object, got {str(entry)[:60]!r}")
    identity = str(entry.get("question_id", entry.get("task_id", entry.get("id", where.split()[-1]))))
    if "turns" in entry:
        return Prompt(identity, str(entry.get("category", "none")), _text(_first(entry["turns"]), where, path))
    if "conversations" in entry:
        humans = [turn.get("value") for turn in entry["conversations"] if turn.get("from") in ("human", "user")]
        return Prompt(identity, str(entry.get("category", "chat")), _text(_first(humans), where, path))
    if "task_id" in entry and "prompt" in entry:
        return Prompt(identity, "code", _text(entry["prompt"], where, path), chat=False)
    if "prompt" in entry:
        category, chat = str(entry.get("category", path.stem)), bool(entry.get("chat", True))
        return Prompt(identity, category, _text(entry["prompt"], where, path), chat)
    raise InvalidOptionError(
        f"{path}, {where} has the keys {sorted(map(str, entry))}; expected 'turns' (Spec-Bench), 'conversations' "
        f"(ShareGPT), 'task_id' and 'prompt' (HumanEval), or 'prompt'"
    )


def _first(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else None


def _text(value: Any, where: str, path: Path) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidOptionError(f"{path}, {where} has no prompt text, got {value!r}")
    return value
