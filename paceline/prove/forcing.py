"""Teacher forcing: fed its own output, the target would have chosen each greedy token itself.

This does not compare two runs but asks the model about one: at every position the emitted token must be its argmax, or
tied with it within the backend's rounding. It holds on every backend, also where equality cannot be promised.
"""

import time
from collections.abc import Sequence

import torch

from paceline.core.outputs import RequestOutput, TokenLogprobs
from paceline.core.sampling_params import SamplingParams
from paceline.prove.check import Check
from paceline.prove.equality import EngineCase
from paceline.prove.workload import GREEDY, Workload, tokens_of

# How far below the best a token may be, in log-probability, where passes of different shapes round differently.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}


def check_forcing(workload: Workload, case: EngineCase, outputs: Sequence[RequestOutput]) -> Check:
    begin_s = time.perf_counter()
    plain = workload.engine(enable_prefix_caching=False)
    gaps: list[float] = []
    for (prompt, setting), output in zip(workload.cases, tokens_of(outputs), strict=True):
        if setting == GREEDY and output:
            gaps += _gaps(plain.generate(prompt + output, ASK)[0].prompt_logprobs or [], len(prompt))
    decoder = workload.model.decoder
    tolerance = 0.0 if decoder.batch_invariant else TOLERANCE[decoder.dtype]
    worst = max(gaps)
    num_off = sum(gap > tolerance for gap in gaps)
    return Check(
        kind="forcing",
        case=case.label,
        passed=num_off == 0,
        finding=f"{num_off} of {len(gaps)} tokens are not the argmax, largest gap {worst:.1e} (allowed {tolerance:g})",
        figures={"num_tokens": len(gaps), "num_off": num_off, "largest_gap": worst, "tolerance": tolerance},
        seconds=time.perf_counter() - begin_s,
    )


ASK = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


def _gaps(logprobs: list[TokenLogprobs | None], num_prompt_tokens: int) -> list[float]:
    """How far each output token is below the likeliest one."""
    answers = [entry for entry in logprobs[num_prompt_tokens:] if entry is not None]
    return [max(entry.top.values()) - entry.logprob for entry in answers]
