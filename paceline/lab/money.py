"""What a million tokens cost, from a machine's price per hour and its speed.

>>> round(dollars_per_million_tokens(3.60, tokens_per_s=1000.0), 2)
1.0
"""

from paceline.errors import InvalidOptionError


def dollars_per_million_tokens(dollars_per_hour: float, tokens_per_s: float, utilization: float = 1.0) -> float:
    """`utilization`: the part of each hour in which the machine has that much to do."""
    if dollars_per_hour < 0 or tokens_per_s <= 0 or not 0 < utilization <= 1:
        raise InvalidOptionError(
            f"a price per hour must be 0 or more, a speed above 0 and a utilization in (0, 1]; got "
            f"{dollars_per_hour}, {tokens_per_s}, {utilization}"
        )
    return dollars_per_hour / (tokens_per_s * utilization * 3600.0) * 1e6
