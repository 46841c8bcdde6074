"""Greedy and seeded output, token for token, against plain decoding of one request at a time.

Plain decoding in a batch is a case like any other: where it differs, the cause is batching and not speculation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.outputs import RequestOutput
from paceline.verify.check import Check
from paceline.verify.share import Share
from paceline.verify.workload import Workload, is_greedy, tokens_of


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One way to run the workload."""

    name: str
    speculative: Mapping[str, Any] | None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None

    @property
    def is_plain(self) -> bool:
        return (self.speculative or {"method": "none"}).get("method") == "none"

    @property
    def promises_seeded_equality(self) -> bool:
        rule: str = (self.speculative or {}).get("rejection_sample_method", "sample_match")
        return rule == "sample_match"

    @property
    def label(self) -> str:
        chunk = f", chunks of {self.max_num_batched_tokens}" if self.max_num_batched_tokens else ""
        return f"{self.name}, batch {self.max_num_seqs}{chunk}"


def run_case(workload: Workload, case: EngineCase) -> tuple[list[RequestOutput], float]:
    """The outputs, and the seconds that they took."""
    begin_s = time.perf_counter()
    speculative = dict(case.speculative or {})
    if speculative.get("method") == "oracle":
        speculative["sequences"] = workload.sequences()
    llm = workload.engine(
        speculative or None, max_num_seqs=case.max_num_seqs, max_num_batched_tokens=case.max_num_batched_tokens
    )
    return workload.run(llm), time.perf_counter() - begin_s


def check_equality(
    workload: Workload, case: EngineCase, outputs: Sequence[RequestOutput], seconds: float
) -> Iterator[Check]:
    """Requests at temperature 0, and seeded ones where the rule promises that."""
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    steps = sum(m.num_steps for m in metrics)
    tokens_per_pass = sum(m.num_output_tokens for m in metrics) / steps if steps else 0.0
    for kind in ("greedy", "seeded") if case.promises_seeded_equality else ("greedy",):
        rows = [i for i, (_, setting) in enumerate(workload.cases) if is_greedy(setting) == (kind == "greedy")]
        if rows:
            yield _compare(workload, case, kind, rows, tokens_of(outputs), tokens_per_pass, seconds / 2)


def _compare(
    workload: Workload,
    case: EngineCase,
    kind: str,
    rows: Sequence[int],
    found: Sequence[list[int]],
    tokens_per_pass: float,
    seconds: float,
) -> Check:
    differing = {i: first_difference(workload.truth[i], found[i]) for i in rows if found[i] != workload.truth[i]}
    num_tokens = sum(len(workload.truth[i]) for i in rows)
    share = Share(len(differing), len(rows))
    where = f", the first at token {min(differing.values())}" if differing else ""
    promised = workload.model.decoder.batch_invariant
    why = "" if promised or not differing else "; not promised: this backend's rounding depends on the batch"
    figures = {
        "num_outputs": len(rows),
        "num_differing": len(differing),
        "interval": share.interval,
        "first_difference": min(differing.values(), default=None),
        "workload": workload.name,
        "requests_differing": list(differing),
        "num_tokens": num_tokens,
        "tokens_per_pass": tokens_per_pass,
        "plain": case.is_plain,
        "differing": [_describe(workload, i, found[i]) for i in list(differing)[:5]],
    }
    finding = f"{share} answers differ{where}; {num_tokens} tokens, {tokens_per_pass:.2f} per pass{why}"
    label = f"{case.label}, {workload.max_tokens} tokens"
    # Whether rounding explains it is for teacher forcing to say, which looks at every case that differs.
    rounding = bool(differing) and not promised
    return Check(kind, label, not differing, finding, figures, seconds, explained_by_rounding=rounding)


def first_difference(truth: Sequence[int], found: Sequence[int]) -> int:
    """The place of the first token that differs; where one is the beginning of the other, its end."""
    pairs = enumerate(zip(truth, found, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(truth), len(found)))


def _describe(workload: Workload, i: int, found: Sequence[int]) -> dict[str, Any]:
    prompt, setting = workload.cases[i]
    truth = workload.truth[i]
    agree = first_difference(truth, found)
    return {
        "prompt_token_ids": prompt,
        "setting": setting,
        "first_difference": agree,
        "plain": truth[agree : agree + 5],
        "speculative": list(found[agree : agree + 5]),
    }
