"""`speculative_config`: which method drafts, how much, and which rule verifies.

The keys are vLLM's where it has one. A key that is unknown, or that belongs to another method, is refused.

>>> config = SpeculativeConfig.parse({"method": "ngram", "num_speculative_tokens": 6})
>>> config.method, config.num_speculative_tokens, config.options["prompt_lookup_max"]
('ngram', 6, 3)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from paceline.errors import InvalidOptionError
from paceline.spec.options import choice, refuse_unknown, resolve
from paceline.spec.proposers import PROPOSERS, Method

REJECTION_SAMPLE_METHODS = ("sample_match", "rejection", "multi_step", "block", "spechub", "typical")
_COMMON_KEYS = ("method", "rejection_sample_method")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    method: str
    options: Mapping[str, Any] = field(default_factory=dict)  # the method's own, defaults filled in, checked
    rejection_sample_method: str = "sample_match"

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
        method = _method_of(given)
        row = method_row(method)
        known = (*_COMMON_KEYS, *row.options)
        refuse_unknown(_explain_foreign(given, method, known), known, f"speculative_config of {method!r}")
        options = resolve(row.options, _fill(row, given))
        if row.cross_check is not None:
            row.cross_check(options)
        rule = given.get("rejection_sample_method", "sample_match")
        rule = choice(*REJECTION_SAMPLE_METHODS)("rejection_sample_method", rule)
        return SpeculativeConfig(method, options, rule)

    @property
    def num_speculative_tokens(self) -> int:
        """The longest path of a draft; 0 for plain decoding."""
        return int(self.options.get("num_speculative_tokens", 0))

    @property
    def node_budget(self) -> int:
        """The most nodes of a draft; 0 for plain decoding."""
        return int(self.options.get("node_budget", 0))


def method_row(method: str) -> Method:
    if method not in PROPOSERS:
        refuse_unknown([method], PROPOSERS, "speculative method names")
    return PROPOSERS[method]


def _method_of(given: Mapping[str, Any]) -> str:
    method = given.get("method")
    if method is None and given.get("model") is not None:
        return "draft_model"  # vLLM's rule: a model and no method is a draft model
    if not isinstance(method, str):
        raise InvalidOptionError(f"speculative_config needs 'method', one of {', '.join(PROPOSERS)}; got {method!r}")
    return method


def _fill(row: Method, given: Mapping[str, Any]) -> dict[str, Any]:
    """A longer path than the default tree holds needs a larger tree, unless the size was given too."""
    filled = {key: value for key, value in given.items() if key not in _COMMON_KEYS and value is not None}
    depth = filled.get("num_speculative_tokens")
    if "node_budget" in row.options and "node_budget" not in filled and isinstance(depth, int):
        default_depth = row.options["num_speculative_tokens"].default
        default_nodes = row.options["node_budget"].default
        chain = default_nodes == default_depth
        filled["node_budget"] = depth if chain else max(depth, default_nodes)
    if isinstance(members := filled.get("members", row.default("members")), Sequence) and not isinstance(members, str):
        filled["members"] = [_share_size(row, filled, member) for member in members]
    return filled


def _share_size(row: Method, filled: Mapping[str, Any], member: Any) -> Any:
    """A member may fill the whole tree, unless it was given a size of its own."""
    if isinstance(member, SpeculativeConfig):
        return member
    given = {"method": member} if isinstance(member, str) else member
    if not isinstance(given, Mapping):
        return given  # the check of `members` says what is wrong with it
    sizes = {key: filled.get(key, row.default(key)) for key in ("num_speculative_tokens", "node_budget")}
    return sizes | {key: value for key, value in given.items() if value is not None}


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
