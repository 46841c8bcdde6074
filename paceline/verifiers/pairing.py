"""Which drafts a rule is right for. A wrong pairing would bias the output silently, so it is refused with the reason.

fixed     tokens that no dice chose: n-gram, suffix, top-k trees, argmax. q is the point mass on the token.
sampled   tokens drawn from the drafter's distribution with noise of its own. The classic rules need that q.
coupled   tokens drawn with the target's own noise. Only sample_match, which never looks at q, may follow.
spechub   pairs around the drafter's likeliest token. Two siblings that merely look like one would be a bias.
"""

from paceline.errors import InvalidOptionError

DRAFT_KINDS = ("fixed", "sampled", "coupled", "spechub")
CHAIN_RULES = ("rejection", "block")


def check_pairing(rule: str, drafting: str, *, draft_probs: bool = False, chain: bool = True) -> None:
    """Raise unless `rule` is exact (or, for typical, defined) for drafts of this kind.

    `draft_probs`: the drafter reports the distribution each token was drawn from. `chain`: it drafts chains only."""
    if drafting not in DRAFT_KINDS:
        raise InvalidOptionError(f"drafts are one of {', '.join(DRAFT_KINDS)}, got {drafting!r}")
    if rule in ("sample_match", "typical"):
        return
    if drafting == "coupled":
        raise InvalidOptionError(
            f"{rule} needs drafts that are independent of its own decisions, but coupled drafts share the target's "
            "noise, and a token drafted again after a rejection is not fresh; use sample_match, or draft 'sampled'"
        )
    if drafting == "sampled" and not draft_probs:
        raise InvalidOptionError(
            f"{rule} compares the target's p with the drafter's q, but this drafter samples its tokens and does not "
            "report q; use sample_match, or let it draft greedily"
        )
    if rule in CHAIN_RULES and not chain:
        raise InvalidOptionError(
            f"{rule} verifies chains, but this method drafts trees; use multi_step or sample_match"
        )
    if (rule == "spechub") != (drafting == "spechub"):
        raise InvalidOptionError(
            f"spechub verifies pairs that were drawn for it (draft mode 'spechub') and no other rule does, but this is "
            f"{rule} on {drafting} drafts; use sample_match, which verifies anything, or multi_step for sampled trees"
        )
