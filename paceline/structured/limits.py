"""How much a grammar may cost, to compile and in every step. What is above is refused, and the message says so."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """All choices. Twice of a limit lets texts through that cost about twice as much."""

    # Of a processor. A refusal is to come within a second, also where the process for it has to be started (0.2 s).
    max_compile_s: float = 0.7
    max_enum_values: int = 20_000  # in all enums of a schema together
    max_ebnf_chars: int = 100_000  # EBNF is translated to Lark in Python, at about a microsecond a character
    max_cached: int = 128  # compiled grammars kept
    max_cached_chars: int = 8_000_000  # of their texts together: a grammar takes some hundred bytes for each
    max_mask_s: float = 5.0  # for the masks of one request's tree: some hundred times what the slowest took
    step_lexer_fuel: int = 200_000  # llguidance's own default: about 14 ms for one mask
    step_max_items: int = 50_000  # the same: about 3 ms
    initial_lexer_fuel: int = 1_000_000  # the same: about 20 ms to compile
    max_lexer_states: int = 50_000  # a fifth of the default: a state takes 1 to 2 kB


DEFAULT_LIMITS = GrammarLimits()
