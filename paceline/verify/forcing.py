"""Teacher forcing: fed its own output, the target would have chosen each token itself.

This does not compare two runs but checks one against the model: at every position the emitted token must be its choice
(the argmax; of a seeded request, with the noise of its seed), or tied with it within the backend's rounding. It holds
on every backend, also where equality cannot be promised, and tells rounding from an answer that is wrong.
"""

import time
from collections.abc import Sequence

from paceline.core.outputs import TokenLogprobs
from paceline.core.request import Request
from paceline.core.sampling_params import SamplingParams
from paceline.ops.sampling import NodeRow, row_noisy_scores
from paceline.structured.compiler import Grammars
from paceline.verify.check import Check
from paceline.verify.equality import EngineCase
from paceline.verify.passes import Part, Passes
from paceline.verify.rounding import allowed_gap, allowed_noisy_gap
from paceline.verify.workload import GREEDY, Workload, is_greedy, is_truncated


def check_forcing(workload: Workload, case: EngineCase, answers: Sequence[list[int]]) -> Check:
    begin_s = time.perf_counter()
    plain = workload.engine(enable_prefix_caching=False)
    gaps: list[float] = []
    for (prompt, setting), output in zip(workload.cases, answers, strict=True):
        if setting == GREEDY and output:
            gaps += _gaps(plain.generate(prompt + output, ASK)[0].prompt_token_logprobs or [], len(prompt))
    return _check(
        f"{case.label}, {workload.max_tokens} tokens, greedy",
        gaps,
        allowed_gap(workload.model.decoder),
        time.perf_counter() - begin_s,
    )


def check_seeded_forcing(workload: Workload, case: EngineCase, answers: Sequence[list[int]]) -> Check | None:
    """The same for seeded requests: each token wins its race of scores with the noise of its seed and position.

    None where every setting cuts tokens off, since rounding may move one across the cut."""
    begin_s = time.perf_counter()
    decoder = workload.model.decoder
    grammars = Grammars(workload.model.tokenizer, decoder.config.vocab_size)
    gaps: list[float] = []
    requests = zip(workload.cases, workload.params(), answers, strict=True)
    for (prompt, setting), params, output in requests:
        if is_greedy(setting) or is_truncated(setting) or not output:
            continue
        request = Request("forced", prompt, params, max_tokens=params.max_tokens or 1, seed=params.seed or 0)
        request.eos_token_ids = workload.model.tokenizer.eos_token_ids
        grammars.constrain(request)
        sequence = prompt + output[:-1]
        logits = Passes(decoder, 1, len(sequence)).logits(Part(0, 0, sequence))[len(prompt) - 1 :]
        for i, token in enumerate(output):
            scores = row_noisy_scores(NodeRow(request, tuple(output[:i]), i), logits)
            gaps.append(float(scores.max() - scores[token]))
    seconds = time.perf_counter() - begin_s
    return (
        _check(f"{case.label}, {workload.max_tokens} tokens, seeded", gaps, allowed_noisy_gap(decoder), seconds)
        if gaps
        else None
    )


def _check(case: str, gaps: Sequence[float], tolerance: float, seconds: float) -> Check:
    worst = max(gaps)
    num_off = sum(gap > tolerance for gap in gaps)
    return Check(
        kind="forcing",
        case=case,
        passed=num_off == 0,
        finding=f"{num_off} of {len(gaps)} tokens are not the target's choice, largest gap {worst:.1e} "
        f"(allowed {tolerance:g})",
        figures={"num_tokens": len(gaps), "num_off": num_off, "largest_gap": worst, "tolerance": tolerance},
        seconds=seconds,
    )


ASK = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


def _gaps(logprobs: list[TokenLogprobs | None], num_prompt_tokens: int) -> list[float]:
    """How far each output token is below the likeliest one."""
    answers = [entry for entry in logprobs[num_prompt_tokens:] if entry is not None]
    return [max(entry.top.values()) - entry.logprob for entry in answers]
