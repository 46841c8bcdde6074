"""What a run of checks has proved, by name.

bits         every answer is the same, alone and in a batch, plain and drafted, and the kernels promise that it stays so
same here    ... but the kernels promise nothing: another prompt, length or batch may show a difference
rounding     each answer is the target's own within rounding, but some differ when they share a pass
broken       something is wrong that rounding does not explain, or kernels that promise bits do not keep to it
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.verify.check import Check
from paceline.verify.share import Share

BITS, SAME_HERE, ROUNDING, BROKEN = "bits", "same here", "agreement within rounding only", "broken"
REMEDY = (
    "For the same answer in any batch run with batch-invariant kernels (--batch-invariant, or "
    "LLM(..., batch_invariant=True)); --allow-rounding accepts agreement within rounding."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    proved: str
    passed: bool
    explanation: str


def make_verdict(checks: Sequence[Check], *, promised: bool, allow_rounding: bool) -> Verdict:
    """`promised`: the decoder says that it is batch invariant."""
    failed = [check for check in checks if not check.passed]
    unexplained = [check for check in failed if not check.explained_by_rounding]
    if unexplained:
        return Verdict(BROKEN, False, _broken(unexplained, promised))
    if failed:
        accepted = " Accepted by --allow-rounding." if allow_rounding else f" {REMEDY}"
        return Verdict(ROUNDING, allow_rounding, _differing(checks) + accepted)
    if promised:
        return Verdict(
            BITS, True, "Every answer is the same, token for token, and every row's logits are the same bits."
        )
    return Verdict(SAME_HERE, True, f"Nothing differed, but these kernels do not promise that it stays so. {REMEDY}")


def _broken(unexplained: Sequence[Check], promised: bool) -> str:
    kinds = ", ".join(sorted({check.kind for check in unexplained}))
    if promised and any(check.kind in ("bits", "greedy", "seeded") for check in unexplained):
        return f"A broken promise: the kernels claim to be batch invariant, and are not (failed: {kinds})."
    return f"Rounding does not explain it (failed: {kinds})."


def _differing(checks: Sequence[Check]) -> str:
    """How many requests have an answer that changes, and how many in plain decoding already.

    A request counts once, in however many cases it differs: the cases share their prompts."""
    compared = [check for check in checks if check.kind in ("greedy", "seeded")]
    plain = [check for check in compared if check.figures["plain"]]
    blame = f" Batching alone, without drafts, changes {_share(plain)}." if plain else ""
    return f"Each token is the target's choice within rounding, but {_share(compared)} answers differ.{blame}"


def _share(checks: Sequence[Check]) -> Share:
    totals = {(check.kind, check.figures["workload"]): check.figures["num_outputs"] for check in checks}
    differing = {
        (check.figures["workload"], request) for check in checks for request in check.figures["requests_differing"]
    }
    return Share(len(differing), sum(totals.values()))
