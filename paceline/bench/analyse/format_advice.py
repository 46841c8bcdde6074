"""Which format to take, in words: the fastest that keeps the reference's quality, at each number of users."""

from collections.abc import Sequence

from paceline.bench.analyse.formats import Drafted, FormatFigures
from paceline.bench.run.format_grid import NO_DRAFTER

# A choice. At half of it, 4-bit formats of small models are all refused; at twice, answers get visibly worse.
MOST_PERPLEXITY = 1.02


def advice(figures: Sequence[FormatFigures]) -> list[str]:
    """Sentences. `figures`: the reference first."""
    reference = figures[0]
    good = [figure for figure in figures if figure.perplexity_ratio <= MOST_PERPLEXITY]
    sentences = [_at(good, reference, users) for users in _users(figures)]
    lost = [figure for figure in figures if figure not in good]
    if lost:
        named = ", ".join(f"{figure.name} ({figure.perplexity_ratio - 1:+.1%})" for figure in lost)
        limit = f"{MOST_PERPLEXITY - 1:.0%}"
        sentences.append(f"Not considered, because perplexity rises by more than {limit}: {named}.")
    nearest = min(figures[1:], key=lambda figure: figure.quality["kl"])
    smallest = min(figures, key=lambda figure: figure.quality["bytes"])
    sentences.append(
        f"Nearest to the reference is {nearest.name} (KL {nearest.quality['kl']:.5f}, the same likeliest token at "
        f"{nearest.quality['same_top']:.1%} of the positions); the smallest is {smallest.name} "
        f"({smallest.quality['bytes'] / 1e6:.0f} MB)."
    )
    return [sentence for sentence in [*sentences, _speculation(figures)] if sentence]


def _users(figures: Sequence[FormatFigures]) -> list[int]:
    return sorted({users for figure in figures for users in figure.plain})


def _at(good: Sequence[FormatFigures], reference: FormatFigures, users: int) -> str:
    found = [(figure, best) for figure in good if (best := figure.best(users)) is not None]
    if not found:
        return ""
    figure, best = max(found, key=lambda pair: pair[1].tokens_per_s)
    base = reference.speed(users)
    times = f", {best.tokens_per_s / base:.2f}x the reference without a drafter" if base else ""
    who = "1 user" if users == 1 else f"{users} users"
    return f"For {who} take {figure.name} with {best.text}: {best.tokens_per_s:.1f} tokens/s{times}."


def _speculation(figures: Sequence[FormatFigures]) -> str:
    """Where speculation gains most and least: formats change what a draft is worth."""
    gains = [(gain, figure, best) for figure in figures if (found := _gain(figure)) for gain, best in [found]]
    if len(gains) < 2:
        return ""
    most, least = max(gains, key=lambda one: one[0]), min(gains, key=lambda one: one[0])
    return (
        f"Speculation gains most on {most[1].name} ({most[0]:.2f}x with {most[2].drafter}, "
        f"{most[2].tokens_per_pass or 0:.2f} tokens per pass) and least on {least[1].name} ({least[0]:.2f}x with "
        f"{least[2].drafter}, {least[2].tokens_per_pass or 0:.2f} tokens per pass)."
    )


def _gain(figure: FormatFigures) -> tuple[float, Drafted] | None:
    """Of its best drafter, with the fewest users."""
    few = min((one.users for one in figure.drafted if one.drafter != NO_DRAFTER), default=None)
    known = [(one.speedup.value, one) for one in figure.drafted if one.users == few and one.speedup is not None]
    return max(known, key=lambda pair: pair[0]) if known else None
