"""The kernels between two passes of a round; ops/rounds.py has their plain twins."""

from paceline.ops.triton.round_rows import write_rows
from paceline.ops.triton.round_walk import move_accepted, walk

__all__ = ["move_accepted", "walk", "write_rows"]
