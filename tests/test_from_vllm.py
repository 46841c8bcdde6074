"""docs/from-vllm.md is true: its tables are those of the code, and what it calls ours exists."""

import pytest

from tests.from_vllm_page import METHODS, NAMES, PAGE, SAMPLING_FIELDS, exists, written_anew


def test_the_tables_are_those_of_the_code() -> None:
    page = PAGE.read_text()
    assert written_anew(page) == page, "python -m tests.from_vllm_page writes them anew"


@pytest.mark.parametrize("ours", sorted({ours for ours, _ in NAMES.values() if ours}))
def test_names_that_are_called_ours_exist(ours: str) -> None:
    assert exists(ours)


def test_what_vllms_users_need_most_is_there() -> None:
    for owner, needed in {
        "LLM": "generate chat get_tokenizer get_default_sampling_params get_metrics from_engine_args",
        "LLMEngine": "from_engine_args add_request step abort_request has_unfinished_requests",
        "AsyncLLM": "from_engine_args generate abort check_health",
    }.items():
        kind, names = METHODS[owner]
        assert all(hasattr(kind, name) and name in names.split() for name in needed.split())
    assert "temperature" in SAMPLING_FIELDS
