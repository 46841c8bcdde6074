"""`speculative_config`: which method drafts, how much, and which rule verifies.

The keys are vLLM's where it has one. A key that is unknown, or that belongs to another method, is refused.

>>> config = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 6})
>>> config.method, config.num_speculative_tokens, config.options["prompt_lookup_max"]
('ngram', 6, 3)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Union

from paceline.core.foreign_options import SPECULATIVE, take_foreign
from paceline.errors import InvalidOptionError
from paceline.models.drafters.detect import find_method
from paceline.spec.config.method import Method
from paceline.spec.config.options import choice, refuse_unknown, resolve
from paceline.spec.config.rule_options import RULE_KEYS, take_rule_options
from paceline.spec.methods import PROPOSERS, TRAINING_FREE
from paceline.verifiers.pairing import CHAIN_RULES, check_pairing

REJECTION_SAMPLE_METHODS = ("sample_match", "rejection", "multi_step", "block", "spechub", "typical")
CLASSIC_RULES = ("rejection", "multi_step", "block", "spechub")  # need drafts that are fixed, or sampled with their q
_COMMON_KEYS = ("method", "rejection_sample_method")
# A user who gives one of these has chosen the size of the drafts, and it is kept.
SIZE_KEYS = ("num_speculative_tokens", "node_budget", "tree_widths", "window_size", "ngram_size", "guess_set_size")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own, defaults filled in, checked
    rejection_sample_method: str = "sample_match"
    rule_options: Mapping[str, Any] = field(default_factory=dict)  # of the rule: make_verifier(rule, **rule_options)
    is_sized: bool = True  # somebody chose a size
    may_be_priced: bool = True  # False: the default size is wanted where nobody chose one (`at_default_size`)

    @staticmethod
    def parse(given: Union[Mapping[str, Any], str, "SpeculativeConfig", None]) -> "SpeculativeConfig | None":
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            given = {"method": given}
        if not isinstance(given, Mapping):
            raise InvalidOptionError(
                f"speculative_config must be a dictionary such as {{'method': 'ngram'}}, got {given!r}"
            )
        given = _with_method(given)
        method = _method_of(given)
        row = method_row(method)
        known = (*_COMMON_KEYS, *RULE_KEYS, *row.options)
        foreign = {key: value for key, value in given.items() if key in SPECULATIVE and key not in known}
        take_foreign("speculative_config", SPECULATIVE, foreign)
        given = {key: value for key, value in given.items() if key not in foreign}
        refuse_unknown(_explain_foreign(given, method, known), known, f"speculative_config of {method!r}")
        rule = given.get("rejection_sample_method") or "sample_match"
        rule = "sample_match" if rule == "standard" else rule  # vLLM's name of its exact rule
        rule = choice(*REJECTION_SAMPLE_METHODS)("rejection_sample_method", rule)
        rule_options = take_rule_options(given, rule)
        options = resolve(row.options, _fill(row, {**given, "method": method}, rule))
        if row.cross_check is not None:
            row.cross_check(options)
        _check_rule(row, options, rule)
        is_sized = _is_sized(given)
        return SpeculativeConfig(method, options, rule, rule_options, is_sized)

    @property
    def sized_by_price(self) -> bool:
        """Nobody chose a size, and drafts may be cut: on a CPU the size that pays is taken (spec/auto)."""
        return PROPOSERS[self.method].priced and self.may_be_priced and not self.is_sized and self._may_be_cut

    @property
    def _may_be_cut(self) -> bool:
        """Some rules compare with the distribution that a draft was sampled from: which of its nodes are offered must
        not depend on what was drawn."""
        sampled = self.options.get("draft_sampling") == "sampled"
        return self.rejection_sample_method == "sample_match" and not sampled

    @property
    def size_chosen(self) -> str:
        """How the size of drafts is chosen on a CPU, for statistics."""
        most = f"{self.node_budget} nodes, depth {self.num_speculative_tokens}"
        if self.sized_by_price or self.method == "auto":
            return f"by price, at most {most}"
        if self.is_sized:
            return f"as given, {most}"
        why = "the rule or the sampling that was chosen needs whole drafts"
        if not (PROPOSERS[self.method].priced and self.may_be_priced):
            why = "sizes by price are not for this use"
        return f"the default, {most}, whether it pays or not: {why}"

    @property
    def num_speculative_tokens(self) -> int:
        """The longest path of a draft; 0 for plain decoding."""
        return int(self.options.get("num_speculative_tokens", 0))

    @property
    def node_budget(self) -> int:
        """The most nodes of a draft; 0 for plain decoding."""
        return int(self.options.get("node_budget", 0))


def at_default_size(given: Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
    """The method at its default size, if nobody chose one: on a CPU too it is drafted whether it pays or not."""
    config = SpeculativeConfig.parse(given)
    assert config is not None
    return replace(config, may_be_priced=False)


def _is_sized(given: Mapping[str, Any]) -> bool:
    """Did somebody choose a size, of all drafts or of one member's?"""
    members = given.get("members")
    own = [one for one in members if isinstance(one, Mapping)] if isinstance(members, list | tuple) else []
    return any(one.get(key) is not None for one in (given, *own) for key in SIZE_KEYS)


def method_row(method: str) -> Method:
    if method not in PROPOSERS:
        refuse_unknown([method], PROPOSERS, "speculative method names")
    return PROPOSERS[method]


def _with_method(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model without a method is what its folder says it is, and else, as in vLLM, a draft model."""
    model = given.get("model")
    if given.get("method") is not None or model is None:
        return given
    found = find_method(model) if isinstance(model, str) else None
    if found is None:
        return {**given, "method": "draft_model"}
    number = given.get("num_speculative_tokens") or found.num_speculative_tokens
    sized = {} if number is None else {"num_speculative_tokens": number}
    return {**given, "method": found.method, **sized}


def _method_of(given: Mapping[str, Any]) -> str:
    method = given.get("method")
    if not isinstance(method, str):
        raise InvalidOptionError(f"speculative_config needs 'method', one of {', '.join(PROPOSERS)}; got {method!r}")
    return method


def _fill(row: Method, given: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """What was given, and the defaults that depend on it."""
    filled = {key: value for key, value in given.items() if value is not None}
    if row.default("members") is None and "members" in row.options and rule in CLASSIC_RULES:
        filled.setdefault("members", TRAINING_FREE)  # they need drafts that are fixed
    if row.derive is not None:
        filled = row.derive(filled)
    if "draft_sampling" in row.options and rule in CLASSIC_RULES:
        filled.setdefault("draft_sampling", "sampled")  # they compare p with the q that was drawn from
    depth = filled.get("num_speculative_tokens")
    if "node_budget" in row.options and "node_budget" not in filled and isinstance(depth, int):
        # A longer path than the default tree holds needs a larger tree; a chain stays a chain.
        default = row.default("node_budget")
        filled["node_budget"] = depth if default == row.default("num_speculative_tokens") else max(depth, default)
    return filled


def _check_rule(row: Method, options: Mapping[str, Any], rule: str) -> None:
    """Refuse a rule that would be wrong for this method's drafts."""
    if rule not in CLASSIC_RULES:
        return  # exact for any draft, or lossy by choice
    for member in options.get("members") or ():
        _check_rule(PROPOSERS[member.method], member.options, rule)
    sampling = options.get("draft_sampling") or "greedy"
    kind = "fixed" if sampling == "greedy" else sampling
    if "members" not in options:
        check_pairing(rule, kind, draft_probs=kind == "sampled", chain=row.chain(options))
    elif rule in CHAIN_RULES:
        check_pairing(rule, "fixed", chain=False)


def _explain_foreign(given: Mapping[str, Any], method: str, known: tuple[str, ...]) -> list[str]:
    """The keys of `given`; raises where one is fine for other methods but not for this one."""
    for key in given:
        owners = [name for name, row in PROPOSERS.items() if key in row.options]
        if key not in known and owners:
            raise InvalidOptionError(
                f"{key!r} does not belong to method {method!r} but to {', '.join(owners)}; "
                f"{method!r} takes {', '.join(known)}"
            )
    return list(given)
