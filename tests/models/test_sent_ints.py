"""Ints that are sent to a device: what was written arrives, and the buffers take turns."""

import torch

from paceline.models.sent_ints import NUM_HOST_BUFFERS, SentInts


def test_what_was_written_arrives_and_the_rest_stays() -> None:
    sent = SentInts(8, torch.device("cpu"))
    turns = []
    for number in range(1, 4):
        turns.append(sent.free())
        sent.hosts[turns[-1]][:] = number
        sent.send(8 - number)
    assert turns == [0, 1, 0][: len(turns)] and NUM_HOST_BUFFERS == 2
    assert sent.device_ints.tolist() == [3, 3, 3, 3, 3, 2, 1, 0]


def test_without_a_number_all_of_it_is_sent() -> None:
    sent = SentInts(4, torch.device("cpu"))
    sent.hosts[sent.free()][:] = 7
    sent.send()
    assert sent.device_ints.tolist() == [7] * 4


def test_single_ints_arrive_and_what_lies_between_them_stays() -> None:
    sent = SentInts(6, torch.device("cpu"))
    sent.hosts[sent.free()][:] = 7
    sent.send_each([1, 4])
    assert sent.device_ints.tolist() == [0, 7, 0, 0, 7, 0]
    assert sent.free() == 1, "the other buffer is next"
