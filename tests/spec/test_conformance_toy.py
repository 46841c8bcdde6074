"""Every method of the table on a toy target: same tokens as plain decoding, trees inside their budgets, nothing kept,
and drafts that are right where every drafter can know the truth.

The toy asserts that every row attends to exactly the positions it should, so a drafter that writes KV where it must not
fails at once. A method added to the table is tested here without being told; the rules are in `conformance.py`."""

import pytest

from paceline.spec.methods import PROPOSERS
from tests.spec.conformance import RULES


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("method", PROPOSERS)
def test_every_method_keeps_every_rule(method: str, rule: str) -> None:
    RULES[rule](method)
