"""docs/methods.md, "Write your own drafter": the file and the row that stand there work as they are."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import InvalidOptionError
from paceline.spec import methods
from paceline.spec.methods import PROPOSERS
from tests.bench.toy_llm import toy_model
from tests.spec.conformance import RULES
from tests.spec.test_conformance_toy import test_every_method_keeps_every_rule as the_suite

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
LIMITS = {"max_num_seqs": 4, "num_kv_blocks": 64, "max_num_batched_tokens": 64}


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> str:
    """The example in its place, for the time of a test; its name in the table."""
    section = PAGE.read_text().split("## Write your own drafter")[1].split("\n## ")[0]
    file, row = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    rows = eval("{" + row + "}", dict(vars(methods)))  # with the names that the table's own rows use
    [(name, method)] = rows.items()
    module = ModuleType(method.target.partition(":")[0])
    exec(compile(file, f"{PAGE.name}: {module.__name__}", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert name not in PROPOSERS
    monkeypatch.setitem(PROPOSERS, name, method)
    return str(name)


@pytest.mark.parametrize("rule", RULES)
def test_the_example_keeps_every_rule(echo: str, rule: str) -> None:
    RULES[rule](echo)


def test_the_suite_runs_every_method_of_the_table() -> None:
    """It is given the table itself, no list of its own: a row is all that a new method needs."""
    tried = {mark.args[0]: mark.args[1] for mark in the_suite.pytestmark}  # type: ignore[attr-defined]
    assert tried["method"] is PROPOSERS and tried["rule"] is RULES


def test_the_example_is_a_method_like_any_other(echo: str) -> None:
    llm = LLM(
        toy_model(),
        {"method": "merge", "node_budget": 32, "members": [{"method": echo, "echo_places": 3}, "ngram"]},
        **LIMITS,
    )
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    plain = LLM(toy_model(), {"method": "none"}, **LIMITS)
    answers = [engine.generate("abcabcabc", params)[0].outputs[0].token_ids for engine in (llm, plain)]
    assert answers[0] == answers[1]
    assert llm.stats()["speculation"]["merge"]["by_member"][echo]["num_draft_tokens"] > 0
    chosen = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, speculative={"method": echo})
    assert plain.generate("abcabcabc", chosen)[0].outputs[0].token_ids == answers[1]
    assert plain.stats()["speculation"][echo]["num_draft_tokens"] > 0
    with pytest.raises(InvalidOptionError, match="echo_places"):
        LLM(toy_model(), {"method": echo, "echo_place": 3}, **LIMITS)
