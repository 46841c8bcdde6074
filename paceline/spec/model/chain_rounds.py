"""A drafting model's part of rounds on the device: it drafts a chain there, one pass for each token.

The model may be the target itself, over some of its layers and on its own keys, or another one with keys of its own in
the target's block tables. The tokens of a pass are drawn in it, with the noise that the target will use, and go into
the next one without a turn of the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.core.request import Request
from paceline.models.padded_decoder import PaddedDecoder, PassKind, sizes_up_to
from paceline.ops import chain as plain_kernels
from paceline.ops.rounds import RoundState
from paceline.spec.round_draft import RoundRoom, Walked, WalkedRoom
from paceline.spec.rounds import RoundSize

TOKENS_ONLY = PassKind(logits=False, hidden_layers=())


class ChainRoundDraft:
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: PaddedDecoder,  # with inputs of its own, and sizes of one and two rows for every number of requests
        target: PaddedDecoder,
        room: RoundRoom,
        *,
        has_own_keys: bool,
        greedy: bool,
        knows: Callable[[Request], bool],  # are the keys of its last draft there, and all before?
    ) -> None:
        self.room, self._model, self._target = room, model, target
        self._first_rows, self._greedy, self._knows = 2 if has_own_keys else 1, greedy, knows
        device = target.device
        self._kernels = _kernels(device)
        self._walked = WalkedRoom(room, device)
        self._trees = torch.zeros(room.max_requests, 1 + 3 * room.num_nodes, dtype=torch.int32, device=device)
        self._trees[:, 1 + room.num_nodes : 1 + 2 * room.num_nodes] = torch.arange(
            -1, room.num_nodes - 1, device=device
        )

    def begin(self, size: RoundSize, requests: Sequence[Request]) -> bool:
        return all(self._knows(request) for request in requests)

    def walked(self, size: RoundSize) -> Walked:
        return self._walked.walked(size.num_requests)

    @torch.no_grad()
    def draft(self, size: RoundSize, state: RoundState, hidden: Tensor | None) -> Tensor:
        count, trees = size.num_requests, self._trees[: size.num_requests]
        length = min(size.budget.num_nodes, size.budget.max_depth)
        for step in range(length):
            self._run(size, state, step)
            drawn = self._model.inputs(count).picked[0, :count]
            torch.clamp(drawn, 0, self._target.config.vocab_size - 1, out=trees[:, 1 + step])
        torch.mul(state.flags[:count], length, out=trees[:, 0])
        return trees

    def _run(self, size: RoundSize, state: RoundState, step: int) -> None:
        count, rows_each = size.num_requests, self._first_rows if step == 0 else 1
        made = self._model.static_pass(count * rows_each, TOKENS_ONLY)
        inputs = self._model.inputs(count * rows_each)
        if step == 0 or (step == 1 and self._first_rows > 1):  # they lie elsewhere for each number of rows
            inputs.block_tables[:count].copy_(self._target.inputs(size.num_rows).block_tables[:count])
        self._kernels.write_chain(
            inputs, state, self.walked(size).pairs, step, rows_each, self._target.room.block_size, greedy=self._greedy
        )
        made.launch_kernels()


def own_layers_draft(
    target: PaddedDecoder, layers: Sequence[int], room: RoundRoom, sampling: str | None
) -> ChainRoundDraft:
    """Some of the target's layers draft, on its own keys: all of them are there."""
    model = target.over(layers, sizes_up_to(2 * room.max_requests))
    greedy = sampling == "greedy"
    return ChainRoundDraft(model, target, room, has_own_keys=False, greedy=greedy, knows=lambda request: True)


def _kernels(device: torch.device) -> Any:
    """As ops/chain.py."""
    if device.type != "cuda":
        return plain_kernels
    from paceline.ops.triton import chain as triton_kernels  # Triton is there where CUDA is

    return triton_kernels
