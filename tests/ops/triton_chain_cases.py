"""The kernel that makes the passes of a drafting model beside its plain twin. Run by test_triton_drafts.py in a process
of its own, in Triton's interpreter or on a GPU."""

import pytest
import torch

from paceline.ops import chain as plain
from paceline.ops import rounds as plain_rounds
from paceline.ops.triton import chain as fused
from paceline.ops.triton import rounds as fused_rounds
from tests.ops.triton_round_cases import BLOCK_SIZE, DEVICE, MOST, VOCAB, Case, make_case


@pytest.mark.parametrize(("step", "rows_each"), [(0, 2), (1, 1)])
@pytest.mark.parametrize("greedy", [False, True])
def test_rows_of_a_chain_are_those_of_the_plain_twin(step: int, rows_each: int, greedy: bool) -> None:
    for seed in range(1 if DEVICE == "cpu" else 4):
        cases: list[Case] = [make_case(seed), make_case(seed, DEVICE)]
        parts = ((plain_rounds, plain), (fused_rounds, fused))
        for (rounds, kernels), case in zip(parts, cases, strict=True):
            rounds.walk(case.inputs, case.state, case.pairs, case.hidden_rows, BLOCK_SIZE, VOCAB, MOST)
            case.inputs.follows.fill_(9)
            kernels.write_chain(case.inputs, case.state, case.pairs, step, rows_each, BLOCK_SIZE, greedy=greedy)
        assert torch.any(cases[0].inputs.slots < 0) and int(cases[0].state.path_counts.max()) > 1
        expected, found = (case.written() for case in cases)
        for name, value in expected.items():
            assert found[name] == value, name
