"""The packer against a slow, literal description of what a pass is (core/forward.py)."""

from unittest import mock

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from paceline.core import packing
from paceline.core.forward import ForwardBatch
from paceline.core.packing import NodePlaces, RequestRows, pack
from paceline.core.tree import EMPTY_TREE, DraftTree

# Fields that no row has a part in, as `pack` sets them.
OF_THE_WHOLE = {"block_size": 0, "draws": None, "wants_logits": True, "follows": None}
TREE = DraftTree([50, 51, 52, 53], [-1, 0, 0, 1])  # two children under the first node, one under the second


def packed(*entries: RequestRows, block_size: int = 4) -> dict[str, object]:
    """The fields of the pass, as lists: the same packed as few rows and as many."""
    found = []
    for most in (0, packing.FEW_ROWS):
        with mock.patch.object(packing, "FEW_ROWS", most):
            batch = pack(entries, block_size)
        values = {name: getattr(batch, name) for name in ForwardBatch.__slots__}
        lists = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        found.append(lists)
    assert found[0] == found[1]
    return found[0]


def described(*entries: RequestRows, block_size: int = 4) -> dict[str, object]:
    """The same, row by row, as the words say it."""
    fields: dict[str, list[object]] = {"cu_query": [0]}
    fields |= {name: [] for name in ForwardBatch.__slots__ if name not in ("cu_query", *OF_THE_WHOLE)}
    most_blocks = max(len(entry.block_ids) for entry in entries)

    def add(entry: RequestRows, token: int, position: int, slot: int, context: int, parent: int, node: bool) -> None:
        fields["token_ids"].append(token)
        fields["positions"].append(position)
        fields["slot_mapping"].append(entry.block_ids[slot // block_size] * block_size + slot % block_size)
        fields["context_lens"].append(context)
        fields["parents"].append(parent)
        fields["is_node"].append(node)
        fields["req_ids"].append(len(fields["block_tables"]))

    for entry in entries:
        first_row = len(fields["token_ids"])
        for i, token in enumerate(entry.token_ids):
            position = entry.start + i
            add(entry, token, position, position, position + 1, -1, False)
        num_tokens, first_node = entry.start + len(entry.token_ids), len(fields["token_ids"])
        for node, (token, parent) in enumerate(zip(entry.nodes.token_ids, entry.nodes.parents, strict=True)):
            position = num_tokens + len(entry.nodes.ancestors(node)) - 1
            add(entry, token, position, num_tokens + node, num_tokens, first_node + parent if parent >= 0 else -1, True)
        last_row = len(fields["token_ids"])
        assert last_row - first_row == entry.num_rows
        fields["logits_rows"] += list(range(last_row - entry.num_wanted, last_row))
        fields["cu_query"].append(last_row)
        fields["block_tables"].append([*entry.block_ids, *[0] * (most_blocks - len(entry.block_ids))])
    return fields | OF_THE_WHOLE | {"block_size": block_size}


def test_a_prompt_chunk_goes_on_where_the_last_one_ended() -> None:
    batch = packed(RequestRows([5, 2, 7], [10, 11, 12, 13], start=3, num_wanted=0))
    assert batch["positions"] == [3, 4, 5, 6]
    assert batch["slot_mapping"] == [23, 8, 9, 10]  # position 3 is the last slot of block 5, then comes block 2
    assert batch["context_lens"] == [4, 5, 6, 7], "a token attends to itself and all before it"
    assert batch["parents"] == [-1] * 4 and batch["is_node"] == [False] * 4
    assert batch["logits_rows"] == []


def test_a_decoding_request_has_one_row_and_its_logits() -> None:
    batch = packed(RequestRows([5, 2], [10], start=6))
    assert (batch["positions"], batch["slot_mapping"], batch["context_lens"]) == ([6], [10], [7])
    assert (batch["logits_rows"], batch["cu_query"], batch["block_tables"]) == ([0], [0, 1], [[5, 2]])


def test_tree_nodes_hang_on_the_last_token() -> None:
    batch = packed(RequestRows([9], [1], start=0, num_wanted=0), RequestRows([5, 2], [10], 2, TREE, num_wanted=5))
    assert batch["token_ids"] == [1, 10, 50, 51, 52, 53]
    assert batch["positions"] == [0, 2, 3, 4, 4, 5], "siblings share a position"
    assert batch["slot_mapping"] == [36, 22, 23, 8, 9, 10], "but each node has a slot of its own"
    assert batch["context_lens"] == [1, 3, 3, 3, 3, 3]
    assert batch["parents"] == [-1, -1, -1, 2, 2, 3], "rows of this pass, or -1 under the last token"
    assert batch["is_node"] == [False, False, True, True, True, True]
    assert batch["req_ids"] == [0, 1, 1, 1, 1, 1]
    assert batch["logits_rows"] == [1, 2, 3, 4, 5]
    assert batch["block_tables"] == [[9, 0], [5, 2]]


def test_nodes_may_stand_anywhere_in_a_text_and_be_written_elsewhere() -> None:
    nodes = DraftTree([7, 8, 9], [-1, -1, 1])
    batch = packed(RequestRows([3, 1], [], 0, nodes, num_wanted=3, nodes_at=NodePlaces([2, 6, 6], [40, 41, 42])))
    assert batch["positions"] == [2, 6, 7]
    assert batch["context_lens"] == [2, 6, 6]
    assert batch["slot_mapping"] == [40, 41, 42]
    assert batch["parents"] == [-1, -1, 1] and batch["is_node"] == [True] * 3


def test_rows_need_blocks_for_all_their_slots() -> None:
    with pytest.raises(IndexError):
        pack([RequestRows([5], [10], 3, TREE)], block_size=4)


def test_the_kernels_integers_have_32_bits() -> None:
    batch = pack([RequestRows([5, 2], [10], 2, TREE)], 4)
    values = {name: getattr(batch, name) for name in ForwardBatch.__slots__}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 10
    assert {name for name, tensor in tensors.items() if tensor.dtype != torch.int32} == {"is_node"}
    assert batch.is_node.dtype == torch.bool
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@st.composite
def request_rows(draw: st.DrawFn, block_size: int) -> RequestRows:
    start, num_tokens = draw(st.integers(0, 20)), draw(st.integers(1, 9))
    parents = [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, 7)))]
    nodes = DraftTree([100 + i for i in range(len(parents))], parents) if parents else EMPTY_TREE
    needed = -(-(start + num_tokens + len(nodes)) // block_size)
    spare = draw(st.integers(0, 2))  # blocks that no row of this pass lies in
    blocks = draw(st.lists(st.integers(0, 90), min_size=needed + spare, max_size=needed + spare, unique=True))
    num_wanted = draw(st.integers(0, num_tokens + len(nodes)))
    return RequestRows(blocks, list(range(num_tokens)), start, nodes, num_wanted)


@given(st.data(), st.sampled_from([1, 2, 4, 16]))
def test_a_packed_pass_agrees_with_its_description(data: st.DataObject, block_size: int) -> None:
    entries = data.draw(st.lists(request_rows(block_size), min_size=1, max_size=5))
    assert packed(*entries, block_size=block_size) == described(*entries, block_size=block_size)
