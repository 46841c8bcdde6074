"""Nothing is ignored silently: what has no effect is in one list with its reason, said once, and refused if it asks."""

import logging

import pytest

from paceline.core.foreign_options import CALL, ENGINE, REQUEST, SAMPLING, SERVE, SPECULATIVE, Foreign, take_foreign
from paceline.errors import InvalidOptionError

TABLES = {
    "LLM": ENGINE, "serve": SERVE, "generate": CALL, "SamplingParams": SAMPLING, "request": REQUEST,
    "speculative_config": SPECULATIVE,
}  # fmt: skip
EVERY = [(where, name) for where, options in TABLES.items() for name in options]


@pytest.mark.parametrize(("where", "name"), EVERY, ids=lambda value: value)
def test_each_is_accepted_with_a_notice_that_gives_the_reason_or_refused_with_it(
    where: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, option = TABLES[where], TABLES[where][name]
    assert len(option.reason) > 8
    take_foreign(where, options, {name: None})
    assert not caplog.records, "None: not given"
    for value in ("anything",) if option.values is None else option.values[:3]:
        caplog.clear()
        take_foreign(where, options, {name: value})
        (record,) = caplog.records
        assert (
            record.levelno == logging.WARNING and name in record.getMessage() and option.reason in record.getMessage()
        )
    if option.values is not None:
        with pytest.raises(InvalidOptionError, match=name) as refused:
            take_foreign(where, options, {name: "something else"})
        assert option.reason in str(refused.value)


def test_several_are_said_in_one_line_and_unknown_ones_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    take_foreign("LLM", ENGINE, {"tensor_parallel_size": 1, "enforce_eager": True})
    assert len(caplog.records) == 1
    with pytest.raises(InvalidOptionError, match="Did you mean 'enforce_eager'"):
        take_foreign("LLM", ENGINE, {"enforce_eagr": True})


def test_true_and_one_are_not_confused_with_a_value_that_was_meant() -> None:
    option = Foreign(({"type": "text"}, []), "reason")
    assert (
        option.accepts([]) and option.accepts({"type": "text"}) and not option.accepts([1]) and not option.accepts("")
    )
