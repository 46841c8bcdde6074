"""Constrained requests in the engine: the same text with and without drafts, whatever happens to them on the way.

The toy's tokens are letters, a to w; any text of them is the grammar's to allow or not."""

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.request import Request
from paceline.core.structured import StructuredOutputsParams
from paceline.engine.core import EngineCore
from paceline.errors import RequestFailedError
from paceline.structured.beside_pass import MaskMaker
from paceline.structured.matching import OutputConstraint
from tests.toy import EOS, ToyTokenizer, run_all, toy_core, toy_request

REGEXES = ("abc(d|e)*f", "(ab|ba){3,5}", "[a-d]{6}", "a(b(c|d)e)*", "abcdefg", "(a|b|c){1,9}w")
DRAFTERS: list[dict[str, Any] | None] = [
    None,
    {"method": "ngram"},
    {"method": "suffix"},
    {"method": "recycling", "node_budget": 12},
    {"method": "lookahead"},
    {"method": "grammar"},
    {"method": "merge", "members": ["ngram", "recycling", "grammar"], "node_budget": 12},
    {"method": "draft_model", "num_draft_layers": 1, "tree_widths": [2, 2]},
]


def request_of(number: int, regex: str, **params: Any) -> Request:
    wanted = StructuredOutputsParams(regex=regex)
    options = {"max_tokens": 14, "seed": number, "temperature": float(number % 2), "structured_outputs": wanted}
    return toy_request(str(number), [1, 2, 3, number % 5], **{**options, **params})


def requests_of(**params: Any) -> list[Request]:
    return [request_of(i, regex, **params) for i, regex in enumerate(REGEXES * 2)]


def text_of(output: Sequence[int]) -> str:
    return ToyTokenizer().decode(output)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    core = toy_core(prefix_caching=False)
    return [run_all(core, [request])[0] for request in requests_of()]


def test_a_finished_text_matches_and_ends(plain: list[list[int]]) -> None:
    num_ended = 0
    for request, output in zip(requests_of(), plain, strict=True):
        wanted = request.sampling_params.structured_outputs
        assert wanted is not None and wanted.regex is not None
        if output[-1] == EOS:
            num_ended += 1
            assert re.fullmatch(wanted.regex, text_of(output))
        else:
            assert len(output) == request.max_tokens
    assert num_ended > 4


@pytest.mark.parametrize("speculative", DRAFTERS, ids=lambda config: str(config and config["method"]))
def test_drafts_change_nothing(plain: list[list[int]], speculative: dict[str, Any] | None) -> None:
    core = toy_core(speculative, num_blocks=256)
    assert run_all(core, requests_of()) == plain
    method = (speculative or {}).get("method")
    if method is not None:
        stats = core.speculator.stats()[method]
        assert not stats.get("num_failures")


def test_a_preempted_request_goes_on_where_it_was(plain: list[list[int]]) -> None:
    core = toy_core({"method": "ngram"}, num_blocks=14, max_num_seqs=6)
    requests = requests_of()
    assert run_all(core, requests) == plain
    assert any(request.num_preemptions for request in requests)


def test_passes_that_draw_tokens_leave_constrained_rows_to_the_host(plain: list[list[int]]) -> None:
    core = toy_core({"method": "ngram"}, num_blocks=256, sizes=[1, 2, 4, 8, 16, 32, 64])
    free = toy_request("free", [1, 2, 3], max_tokens=10)
    outputs = run_all(core, [*requests_of(), free])
    assert outputs[:-1] == plain
    assert outputs[-1] == run_all(toy_core(), [toy_request("free", [1, 2, 3], max_tokens=10)])[0]


def test_forced_text_is_accepted_whole() -> None:
    core = toy_core({"method": "grammar"})
    (output,) = run_all(core, [request_of(0, "abcdefghijklm", max_tokens=30)])
    assert text_of(output) == "abcdefghijklm" and output[-1] == EOS
    counts = core.speculator.stats()["grammar"]
    assert counts["num_accepted_tokens"] == counts["num_draft_tokens"] > 10
    assert core.clock.num_steps <= 3  # the first token comes with the prompt, all others in one draft


def test_no_node_is_verified_that_cannot_come() -> None:
    core = toy_core({"method": "recycling", "node_budget": 12}, num_blocks=256)
    request = request_of(1, "(ab|ba){3,9}", max_tokens=14)
    core.add_request(request)
    num_nodes = 0
    while core.has_requests:
        core.step()
        paths = [[request.draft.token_ids[i] for i in request.draft.ancestors(n)] for n in range(len(request.draft))]
        assert all(re.fullmatch("(ab|ba)*(a|b)?", text_of([*request.output_token_ids, *path])) for path in paths)
        num_nodes += len(paths)
    assert num_nodes > 0


def test_the_end_of_the_grammar_comes_before_min_tokens() -> None:
    """There is nothing else to say: min_tokens holds the end back only where the text can go on."""
    (short,) = run_all(toy_core(), [request_of(0, "abc", min_tokens=8)])
    assert text_of(short) == "abc" and short[-1] == EOS and len(short) == 4
    (longer,) = run_all(toy_core(), [request_of(0, "a*", min_tokens=8)])
    assert len(text_of(longer)) >= 8


def test_ignore_eos_repeats_the_end_and_nothing_else() -> None:
    request = request_of(0, "abc", ignore_eos=True, max_tokens=7)
    (output,) = run_all(toy_core({"method": "grammar"}), [request])
    assert output == [0, 1, 2, EOS, EOS, EOS, EOS] and request.finish_reason == "length"


def test_a_stop_string_and_a_stop_token_end_the_text_early() -> None:
    stopped = request_of(0, "abcdef", stop=["cd"])
    run_all(toy_core({"method": "grammar"}), [stopped])
    assert stopped.finish_reason == "stop" and stopped.stop_reason == "cd"
    by_token = request_of(0, "abcdef", stop_token_ids=[3])
    run_all(toy_core({"method": "grammar"}), [by_token])
    assert by_token.output_token_ids == [0, 1, 2, 3] and by_token.stop_reason == 3


def test_options_that_leave_nothing_end_the_request_alone() -> None:
    barred = request_of(0, "abc", allowed_token_ids=[0, 2])
    other = request_of(1, "abcd")
    run_all(toy_core(), [barred, other])
    assert isinstance(barred.error, RequestFailedError) and text_of(other.output_token_ids) == "abcd"


@pytest.mark.faults
def test_a_matcher_that_breaks_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, other = request_of(0, "[a-d]{9}"), request_of(1, "abcd")
    core = toy_core({"method": "ngram"})
    core.add_request(broken)
    core.add_request(other)
    core.step()
    monkeypatch.setattr(broken.constraint, "_make_masks", lambda matcher, tree: 1 / 0)
    while core.has_requests:
        core.step()
        core.check_integrity()
    assert isinstance(broken.error, RequestFailedError) and "ZeroDivisionError" in str(broken.error)
    assert text_of(other.output_token_ids) == "abcd"


def test_a_grammar_that_takes_too_long_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    release = threading.Event()
    slow, other = request_of(0, "[a-d]{9}", top_p=0.9, temperature=1.0), request_of(1, "abcd")
    core = toy_core()
    core.masks = core.launcher.masks = MaskMaker(max_mask_s=0.05)
    for request in (slow, other):
        core.add_request(request)
    started = threading.Event()

    def wait(tree: Any) -> None:
        started.set()
        release.wait(10)

    monkeypatch.setattr(slow.constraint, "prepare", wait)
    forward = core.runner.model.forward

    def forward_once_masks_have_begun(*args: Any, **kwargs: Any) -> Any:
        started.wait(10)
        return forward(*args, **kwargs)

    monkeypatch.setattr(core.runner.model, "forward", forward_once_masks_have_begun)
    while core.has_requests:
        core.step()
    release.set()
    assert "took more than" in str(slow.error) and text_of(other.output_token_ids) == "abcd"


def test_an_aborted_request_lets_go_of_its_matcher() -> None:
    core = toy_core({"method": "ngram"})
    request = request_of(0, "[a-d]{9}")
    core.add_request(request)
    core.step()
    assert isinstance(request.constraint, OutputConstraint) and request.constraint._matcher is not None
    core.abort(request.request_id)
    assert request.constraint._matcher is None
    core.check_integrity()


def test_a_shared_prefix_in_the_cache_changes_nothing(plain: list[list[int]]) -> None:
    core = toy_core({"method": "ngram"}, num_blocks=256)
    prompt = list(range(12))

    def outputs(core: EngineCore, name: str) -> list[list[int]]:
        wanted = [StructuredOutputsParams(regex=regex) for regex in REGEXES]
        batch = [toy_request(f"{name}{i}", prompt, 12, structured_outputs=one) for i, one in enumerate(wanted)]
        return [run_all(core, [request])[0] for request in batch]

    assert outputs(core, "first") == outputs(core, "again") == outputs(toy_core(prefix_caching=False), "alone")


def test_masks_are_made_beside_the_pass_or_afterwards_never_twice() -> None:
    core = toy_core()
    made: list[str] = []
    request = request_of(0, "abcd", logit_bias={0: 0.5})  # has to be applied after the mask
    core.add_request(request)
    assert isinstance(request.constraint, OutputConstraint)
    real = request.constraint._make_masks
    request.constraint._make_masks = lambda matcher, tree: (made.append("x"), real(matcher, tree))[1]  # type: ignore
    steps = itertools.count()
    while core.has_requests:
        core.step()
        next(steps)
    assert len(made) == next(steps) == core.masks.figures()["num_masked_steps"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_the_grammar_allows_needs_no_mask(temperature: float) -> None:
    core = toy_core({"method": "ngram"})
    request = request_of(0, "[a-x]*", temperature=temperature)
    run_all(core, [request])
    figures = core.masks.figures()
    assert len(request.output_token_ids) > 2
    assert figures["num_masked_steps"] == 0 and figures["num_late_masks"] <= 2  # where the toy chose an odd token


@pytest.mark.parametrize("method", [None, {"method": "ngram"}, {"method": "grammar"}])
def test_choosing_first_and_asking_afterwards_gives_the_tokens_of_the_masks(
    method: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [run_all(toy_core(method), [request])[0] for request in requests_of()]
    masked = []
    for request in requests_of():
        core = toy_core(method)
        monkeypatch.setattr(OutputConstraint, "is_quick_to_ask", False)
        masked.append(run_all(core, [request])[0])
        assert core.masks.figures()["num_masked_steps"] > 0
    assert asked == masked
