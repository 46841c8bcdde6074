"""What the engine samples on the real model, against the model's own distribution.

Many requests with the same prompt and different seeds each emit a few tokens. The first comes from the prompt's own
pass; the second is verified against a draft, and given the first its distribution is known: the model's own answer to
prompt + first token. The counts of second tokens are tested twice; each test states its odds of failing by chance:

- chi-square over the tokens expected at least five times, the others pooled;
- total variation, against the most that sampling noise explains (its mean, and McDiarmid's bound on the deviation).
"""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.core.sampling_params import SamplingParams
from paceline.llm import LLM
from paceline.verify.check import Check
from paceline.verify.workload import Workload, tokens_of

TOP_K = 20  # few enough that log-probabilities tell the whole distribution
TEMPERATURE = 1.2
LENGTH = 4  # long enough for a draft of three
MIN_EXPECTED = 5.0


def check_distribution(
    workload: Workload, name: str, speculative: Mapping[str, Any], num_samples: int, false_alarm: float
) -> Check:
    """`false_alarm`: odds that a correct engine fails this check."""
    begin_s = time.perf_counter()
    prompt = workload.prompts[0]
    config = dict(speculative)
    if config.get("method") == "oracle":
        config["sequences"] = workload.sequences()
    llm = workload.engine(config, max_num_seqs=64)
    params = [
        SamplingParams(temperature=TEMPERATURE, top_k=TOP_K, seed=seed, max_tokens=LENGTH, ignore_eos=True)
        for seed in range(num_samples)
    ]
    outputs = llm.generate([prompt] * num_samples, params)
    pairs = Counter((tokens[0], tokens[1]) for tokens in tokens_of(outputs))
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs if output.metrics)
    statistic, freedom, excess, compared = _compare(workload, prompt, pairs, false_alarm / 2)
    pvalue = chi_square_tail(statistic, freedom)
    finding = (
        f"chi-square p = {pvalue:.3f} ({freedom} degrees), TV {excess:+.3f} of its limit, {compared} samples, "
        f"{accepted} drafts accepted; false alarm {false_alarm:.0e}"
    )
    if freedom == 0 and pvalue > 0.0:
        finding = f"{num_samples} samples are too few to test anything: take more (--samples)"
    return Check(
        kind="distribution",
        case=name,
        passed=freedom > 0 and pvalue > false_alarm / 2 and excess <= 0.0,
        finding=finding,
        figures={
            "pvalue": pvalue,
            "degrees_of_freedom": freedom,
            "total_variation_over_limit": excess,
            "num_samples": compared,
            "num_accepted_draft_tokens": accepted,
            "false_alarm": false_alarm,
        },
        seconds=time.perf_counter() - begin_s,
    )


def _compare(
    workload: Workload, prompt: Sequence[int], pairs: Counter[tuple[int, int]], false_alarm: float
) -> tuple[float, int, float, int]:
    """Chi-square and its degrees of freedom over all first tokens, the worst total variation, samples compared."""
    firsts: Counter[int] = Counter()
    for (first, _), count in pairs.items():
        firsts[first] += count
    frequent = [first for first, count in firsts.most_common(8) if count >= 8 * MIN_EXPECTED]
    plain = workload.engine()
    statistic, freedom, worst, compared = 0.0, 0, -1.0, 0
    for first in frequent:
        expected = model_distribution(plain, [*prompt, first])
        counts = Counter({second: count for (start, second), count in pairs.items() if start == first})
        added, degrees = chi_square(counts, expected)
        statistic, freedom = statistic + added, freedom + degrees
        worst = max(worst, excess_total_variation(counts, expected, false_alarm / len(frequent)))
        compared += counts.total()
    return statistic, freedom, worst, compared


def model_distribution(plain: LLM, token_ids: Sequence[int]) -> dict[int, float]:
    """p after these tokens under TEMPERATURE and TOP_K, from the model's own log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOP_K + 5)
    logprobs = plain.generate(list(token_ids), params)[0].outputs[0].token_logprobs
    assert logprobs is not None
    top = logprobs[0].top
    kth = sorted(top.values(), reverse=True)[TOP_K - 1]
    weights = {token: math.exp(value / TEMPERATURE) for token, value in top.items() if value >= kth}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def chi_square(counts: Counter[int], expected: Mapping[int, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; a token that cannot occur makes it infinite."""
    if any(token not in expected for token in counts):
        return math.inf, 1
    total = counts.total()
    cells: list[tuple[float, float]] = []  # (found, expected)
    rare_found, rare_expected = 0.0, 0.0
    for token, p in expected.items():
        if p * total >= MIN_EXPECTED:
            cells.append((counts[token], p * total))
        else:
            rare_found, rare_expected = rare_found + counts[token], rare_expected + p * total
    if rare_expected >= MIN_EXPECTED or not cells:
        cells.append((rare_found, rare_expected))
    elif rare_expected > 0.0:  # too few for a cell of their own
        found, wanted = cells.pop()
        cells.append((found + rare_found, wanted + rare_expected))
    return sum((found - wanted) ** 2 / wanted for found, wanted in cells), len(cells) - 1


def chi_square_tail(statistic: float, freedom: int) -> float:
    """The odds of a statistic this large or larger."""
    if math.isinf(statistic):
        return 0.0
    if freedom == 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def excess_total_variation(counts: Counter[int], expected: Mapping[int, float], false_alarm: float) -> float:
    """Total variation less the limit that sampling noise stays below but for odds of `false_alarm`."""
    total = counts.total()
    found = 0.5 * sum(abs(counts[t] / total - expected.get(t, 0.0)) for t in {*counts, *expected})
    mean = 0.5 * sum(math.sqrt(p * (1.0 - p) / total) for p in expected.values())  # Jensen: at least the true mean
    return found - mean - math.sqrt(math.log(1.0 / false_alarm) / (2.0 * total))
