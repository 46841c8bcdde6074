"""Speculation counters out of a Prometheus page: vLLM's names, under any prefix (ours or vLLM's).

>>> page = 'vllm:spec_decode_num_drafts_total{engine="0"} 10.0'
>>> speculation_counts(page).num_drafts
10
"""

import re

from paceline.core.draft_counts import DraftCounts

_SAMPLE = re.compile(r"^(?P<name>[\w:]+?)(?:_total)?(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[-+.\deE]+)")
_POSITION = re.compile(r'position="(\d+)"')
_FIELDS = {
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def speculation_counts(page: str) -> DraftCounts | None:
    """The counters, added up over engines; None where the page has none."""
    counts: dict[str, int] = {}  # by field
    per_position: list[int] = []
    for line in page.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None:
            continue
        name = re.split(r"[:]|(?=spec_decode)", sample["name"])[-1]
        value = round(float(sample["value"]))
        if name in _FIELDS:
            counts[_FIELDS[name]] = counts.get(_FIELDS[name], 0) + value
        elif name == _PER_POSITION:
            position = _POSITION.search(sample["labels"] or "")
            if position is not None:
                _add_at(per_position, int(position[1]), value)
    return DraftCounts.from_dict(counts | {"accepted_per_position": per_position}) if counts else None


def _add_at(values: list[int], index: int, amount: int) -> None:
    values.extend([0] * (index + 1 - len(values)))
    values[index] += amount
