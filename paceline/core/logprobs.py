"""A token's log-probability as vLLM gives it. Dictionaries of these are made when they are read (core/outputs.py)."""

from dataclasses import dataclass


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1: the likeliest token
    decoded_token: str | None = None
