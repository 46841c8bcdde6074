"""Padding a pass: real rows arrive as they are, and padding rows can neither write nor read a slot."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.forward import ForwardBatch, TokenDraws
from paceline.core.packing import RequestRows, pack
from paceline.core.tree import DraftTree
from paceline.models.static_inputs import MAX_SENT_ALONE, PassRoom, StaticInputs, read_tokens

BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS, MAX_SIZE = 4, 9, 6, 40
CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn) -> ForwardBatch:
    entries = []
    for i in range(draw(st.integers(1, MAX_SEQS))):
        start, count = draw(st.integers(0, 20)), draw(st.integers(1, 3))
        parents = [draw(st.integers(-1, node - 1)) for node in range(draw(st.integers(0, 3)))]
        tree = DraftTree([draw(st.integers(0, 99)) + 100 * node for node in range(len(parents))], parents)
        num_blocks = -(-(start + count + len(parents)) // BLOCK_SIZE)
        blocks = [MAX_BLOCKS * i + block for block in range(num_blocks)]
        tokens = [draw(st.integers(0, 99)) for _ in range(count)]
        entries.append(RequestRows(blocks, tokens, start, tree, draw(st.integers(0, 1)) * (1 + len(parents))))
    return pack(entries, BLOCK_SIZE)


def draws(count: int) -> TokenDraws:
    rng = np.random.default_rng(count)
    return TokenDraws(
        rng.random(count, dtype=np.float32),
        rng.integers(-(2**63), 2**63 - 1, count, dtype=np.int64),
        rng.integers(0, 1000, count, dtype=np.int32),
    )


def inputs() -> StaticInputs:
    kv = torch.zeros(1, 2, MAX_BLOCKS * MAX_SEQS * BLOCK_SIZE, 1, 1)
    made = StaticInputs(PassRoom(kv, BLOCK_SIZE, MAX_BLOCKS, MAX_SEQS), MAX_SIZE, CPU)
    for host in made._sent.hosts:
        host.fill_(12345)  # what an earlier, larger pass left behind
    return made


@settings(max_examples=150, deadline=None)
@given(batches(), st.integers(0, 5), st.booleans())
def test_padding_touches_no_slot_and_leaves_real_rows_alone(batch: ForwardBatch, extra: int, has_draws: bool) -> None:
    num_rows, num_logits = batch.num_rows, len(batch.logits_rows)
    static, size = inputs(), num_rows + extra
    given_draws = draws(num_logits)
    full = ForwardBatch(
        batch.token_ids, batch.positions, batch.slot_mapping, batch.context_lens, batch.parents, batch.is_node,
        batch.req_ids, batch.block_tables, batch.cu_query, batch.logits_rows, BLOCK_SIZE,
        given_draws if has_draws else None,
    )  # fmt: skip
    static.write(full, size)
    views = static.views(size)
    assert views.counts.tolist() == [num_rows, batch.block_tables.shape[0], num_logits]
    for found, given_values in (
        (views.token_ids, batch.token_ids),
        (views.positions, batch.positions),
        (views.slots, batch.slot_mapping),
        (views.context_lens, batch.context_lens),
        (views.parents, batch.parents),
        (views.is_node, batch.is_node),
        (views.req_ids, batch.req_ids),
        (views.logits_rows, batch.logits_rows),
    ):
        assert found.shape == (size,)
        assert found[: len(given_values)].tolist() == given_values.int().tolist()
    assert (views.slots[num_rows:] == -1).all(), "a padding row writes no slot"
    assert (views.context_lens[num_rows:] == 0).all() and (views.is_node[num_rows:] == 0).all(), "and reads none"
    assert (views.token_ids[num_rows:] == 0).all() and (views.req_ids[num_rows:] == 0).all()
    assert (views.logits_rows[num_logits:] == 0).all(), "a row that there is"
    width = batch.block_tables.shape[1]
    assert torch.equal(views.block_tables[: batch.block_tables.shape[0], :width], batch.block_tables)
    expected = given_draws if has_draws else TokenDraws(*(np.zeros_like(x) for x in _arrays(given_draws)))
    assert np.array_equal(views.temperatures[:num_logits].numpy(), expected.temperatures)
    assert np.array_equal(views.seeds[:num_logits].numpy(), expected.seeds)
    assert np.array_equal(views.draw_positions[:num_logits].numpy(), expected.positions)
    assert (views.temperatures[num_logits:] == 0).all(), "padding is greedy: no noise is made for it"


def _arrays(made: TokenDraws) -> tuple[np.ndarray, ...]:  # type: ignore[type-arg]
    return made.temperatures, made.seeds, made.positions


def test_two_passes_in_a_row_are_written_to_different_host_buffers() -> None:
    """The device may still read the last one."""
    static = inputs()
    first = pack([RequestRows([0], [5], 0)], BLOCK_SIZE)
    second = pack([RequestRows([1], [6], 0)], BLOCK_SIZE)
    static.write(first, 1)
    before = static._sent.hosts[0].clone()
    static.write(second, 1)
    assert torch.equal(static._sent.hosts[0], before)
    assert static.views(1).token_ids.tolist() == [6]


def test_a_token_whose_score_is_not_finite_is_none() -> None:
    scores = torch.tensor([1.5, torch.inf, -3.0, torch.nan])
    picked = torch.stack([torch.tensor([4, 5, 6, 7], dtype=torch.int32), scores.view(torch.int32)])
    assert read_tokens(picked) == [4, None, 6, None]
    assert read_tokens(picked[:, [0, 2]]) == [4, 6]


def test_tables_that_have_grown_are_the_same_sent_alone_or_whole() -> None:
    tables = np.arange(MAX_SEQS * MAX_BLOCKS, dtype=np.int32).reshape(MAX_SEQS, MAX_BLOCKS)
    places = [(0, 3), (4, 8), (5, 0)]
    found = {}
    for name, grown in (("alone", places), ("whole", []), ("too many", places * MAX_SENT_ALONE)):
        static = inputs()
        static.write_tables(tables, 7)
        changed = tables.copy()
        for place in places:
            changed[place] += 1000
        static.write_tables(changed, 7, grown)
        found[name] = static.views(7).block_tables.clone()
        assert found[name].numpy().tolist() == changed.tolist(), name
    assert torch.equal(found["alone"], found["whole"])
