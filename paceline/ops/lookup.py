"""Drafts out of a request's own text on the device: the plain twins of ops/triton/lookup.py.

Each request has a line of `texts` with its tokens, prompt first. `store_parts` puts there what the host knows,
`append_walked` what a walk has accepted (ops/rounds.py). `find_places` compares the last tokens with those before every
other place: a key says how many of them stood there, and where. `copy_paths` follows the places in the order of their
keys, the highest first, that is the longest match and then the newest, and joins what came after them into one tree.

There is no index: a text is a few kilobytes, and all of it is compared at once.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

MAX_PLACES = 32  # followed for one tree: bounds the time where a token stands everywhere
CHUNK = 1024  # places that have one best key: a choice, which costs a program at half, and time to look again at twice


class WalkedTokens(Protocol):
    """What a walk has found of each request: the newest at the end. [R, F] or [R] int32, one stride for all."""

    @property
    def positions(self) -> Tensor: ...

    @property
    def next_tokens(self) -> Tensor: ...

    @property
    def counts(self) -> Tensor: ...


class LastTokens(Protocol):
    """[R] int32"""

    @property
    def flags(self) -> Tensor: ...  # 0: it has ended

    @property
    def positions(self) -> Tensor: ...  # of the last token


def num_chunks(max_length: int) -> int:
    return 1 << (-(-max_length // CHUNK) - 1).bit_length()


def store_parts(sent: Tensor, num_parts: int, texts: Tensor) -> None:
    """`sent`: int32: of each part its line, its first position, how many tokens it has and where in `sent` they are."""
    for line, first, count, begin in sent[: 4 * num_parts].view(-1, 4).tolist():
        texts[line, first : first + count] = sent[begin : begin + count]


def append_walked(walked: WalkedTokens, lines: Tensor, texts: Tensor) -> None:
    for i, count in enumerate(walked.counts.tolist()):
        if count:
            first = int(walked.positions[i, -count]) + 1
            texts[int(lines[i]), first : first + count] = walked.next_tokens[i, -count:]


def find_places(
    texts: Tensor,  # [lines, max_length] int32
    lines: Tensor,  # [R] int32
    last: LastTokens,
    keys: Tensor,  # [R, chunks * CHUNK] int32, written: tokens that match * max_length + place; 0: too few do
    bests: Tensor,  # [R, chunks] int32, written: the highest key of each chunk
    shortest: int,  # tokens that must match
    longest: int,  # and after which nobody looks
) -> None:
    max_length = texts.shape[1]
    for i in range(len(lines)):
        bests[i] = 0
        if not last.flags[i]:
            continue
        end = int(last.positions[i])  # of the places: what ends at the last token would find itself
        text, places = texts[int(lines[i])], torch.arange(end)
        matched, agrees = torch.zeros(end, dtype=torch.int32), torch.ones(end, dtype=torch.bool)
        for n in range(longest):
            agrees &= (places >= n) & (text[(places - n).clamp(min=0)] == text[max(0, end - n)])
            matched += agrees
        own = torch.where(matched >= shortest, matched * max_length + places, 0).int()
        keys[i, :end] = own
        for chunk in range(-(-end // CHUNK)):
            bests[i, chunk] = own[chunk * CHUNK : (chunk + 1) * CHUNK].max()


def copy_paths(
    texts: Tensor,
    lines: Tensor,
    last: LastTokens,
    keys: Tensor,
    bests: Tensor,
    trees: Tensor,  # [R, 1 + 3 * K] int32, written: see spec/tree_answers.py
    num_nodes: int,
    max_depth: int,
) -> None:
    most, max_length = (trees.shape[1] - 1) // 3, texts.shape[1]
    for i in range(len(lines)):
        nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
        log_probs: list[float] = []
        for key in _in_order(keys[i], bests[i], int(last.positions[i])):
            matched, place = divmod(key, max_length)
            path = _copy_from(texts[int(lines[i])], place + 1, int(last.positions[i]) + 1, max_depth)
            parent = -1
            for token in path:
                if (parent, token) not in nodes:
                    if len(nodes) == num_nodes:
                        break
                    nodes[parent, token] = len(nodes)
                    log_probs.append(math.log(matched / (matched + 1)))
                parent = nodes[parent, token]
            if len(nodes) == num_nodes:
                break
        trees[i, 0] = count = len(nodes)
        trees[i, 1 : 1 + count] = torch.tensor([token for _, token in nodes], dtype=torch.int32)
        trees[i, 1 + most : 1 + most + count] = torch.tensor([parent for parent, _ in nodes], dtype=torch.int32)
        trees[i, 1 + 2 * most : 1 + 2 * most + count] = torch.tensor(log_probs).float().view(torch.int32)


def _in_order(keys: Tensor, bests: Tensor, end: int) -> list[int]:
    if not bests.any():
        return []
    return [key for key in keys[:end].sort(descending=True).values[:MAX_PLACES].tolist() if key > 0]


def _copy_from(text: Tensor, start: int, length: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end it goes round again."""
    return [int(text[start + step % (length - start)]) for step in range(count)]
