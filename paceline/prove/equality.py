"""Greedy and seeded output, token for token, against plain decoding."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.outputs import RequestOutput
from paceline.prove.check import Check
from paceline.prove.workload import Workload, is_greedy, tokens_of


@dataclass(frozen=True, slots=True)
class EngineCase:
    """One way to run the workload."""

    name: str
    speculative: Mapping[str, Any] | None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None

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
    found: Sequence[Sequence[int]],
    tokens_per_pass: float,
    seconds: float,
) -> Check:
    differing = [i for i in rows if list(found[i]) != workload.truth[i]]
    num_tokens = sum(len(workload.truth[i]) for i in rows)
    finding = f"{len(differing)} of {len(rows)} outputs differ, {num_tokens} tokens, {tokens_per_pass:.2f} per pass"
    figures = {
        "num_outputs": len(rows),
        "num_differing": len(differing),
        "num_tokens": num_tokens,
        "tokens_per_pass": tokens_per_pass,
        "differing": [_describe(workload, i, found[i]) for i in differing[:5]],
    }
    passed = not differing
    if differing and not workload.model.decoder.batch_invariant:
        # Rows may round differently when they share a pass; then equality is not promised, teacher forcing decides.
        passed, finding = True, f"{finding}; not promised: this backend's rounding depends on the batch"
    return Check(kind, case.label, passed, finding, figures, seconds)


def _describe(workload: Workload, i: int, found: Sequence[int]) -> dict[str, Any]:
    prompt, setting = workload.cases[i]
    truth = workload.truth[i]
    agree = next((n for n, (a, b) in enumerate(zip(truth, found, strict=False)) if a != b), min(len(truth), len(found)))
    return {
        "prompt_token_ids": prompt,
        "setting": setting,
        "first_difference": agree,
        "plain": truth[agree : agree + 5],
        "speculative": list(found[agree : agree + 5]),
    }
