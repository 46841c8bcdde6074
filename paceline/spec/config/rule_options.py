"""Options of the verification rules, given in `speculative_config` beside `rejection_sample_method`.

>>> take_rule_options({"rejection_sample_method": "typical", "epsilon": 0.2}, "typical")
{'epsilon': 0.2, 'alpha': 0.3}
"""

from collections.abc import Mapping
from typing import Any

from paceline.errors import InvalidOptionError
from paceline.spec.config.options import Option, positive, resolve

RULE_OPTIONS: dict[str, dict[str, Option]] = {
    "typical": {
        "epsilon": Option(0.09, positive(1.0), "a draft token at least this likely is always let through"),
        "alpha": Option(0.3, positive(1.0), "how far the threshold falls where the target is undecided"),
    },
}
RULE_KEYS = tuple(key for options in RULE_OPTIONS.values() for key in options)


def take_rule_options(given: Mapping[str, Any], rule: str) -> dict[str, Any]:
    """The options of `rule` among what was given, defaults filled in; refuses options of another rule."""
    own = RULE_OPTIONS.get(rule, {})
    for owner, options in RULE_OPTIONS.items():
        foreign = [key for key in options if key not in own and given.get(key) is not None]
        if foreign:
            raise InvalidOptionError(
                f"{foreign[0]!r} is an option of rejection_sample_method {owner!r}, but the rule is {rule!r}: "
                "choose that rule or leave the option out"
            )
    return resolve(own, {key: value for key, value in given.items() if key in own and value is not None})
