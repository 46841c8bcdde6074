"""KV events over ZeroMQ: what a reader of vLLM's events gets, live and by replay. Skipped without pyzmq."""

import asyncio

import pytest

from paceline.cluster.events import BlockStored, EventLog, decode_batch
from paceline.cluster.zmq_events import END, ZmqEvents
from paceline.errors import InvalidOptionError

zmq = pytest.importorskip("zmq", reason="the extra cluster is not installed")


def test_batches_come_with_their_numbers_and_again_when_asked_for() -> None:
    async def run() -> None:
        import zmq.asyncio

        context, log = zmq.asyncio.Context.instance(), EventLog()
        published = ZmqEvents(log, "tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv")
        live, again = (socket.getsockopt(zmq.LAST_ENDPOINT).decode() for socket in published._sockets)
        reader = context.socket(zmq.SUB)
        reader.linger = 0
        reader.subscribe(b"kv")
        reader.connect(live)
        asker = context.socket(zmq.DEALER)
        asker.linger = 0
        asker.connect(again)
        await asyncio.sleep(0.2)  # a subscription takes a moment
        for i in range(3):
            published.publish(*log.append([BlockStored((i,))]))
            topic, number, payload = await asyncio.wait_for(reader.recv_multipart(), 5)
            assert (topic, number) == (b"kv", i.to_bytes(8, "big"))
            assert decode_batch(payload) == [BlockStored((i,))]
        await asker.send_multipart([b"", (1).to_bytes(8, "big")])
        answers = [await asyncio.wait_for(asker.recv_multipart(), 5) for _ in range(3)]
        assert [answer[1] for answer in answers] == [(1).to_bytes(8, "big"), (2).to_bytes(8, "big"), END]
        for socket in (reader, asker):
            socket.close()
        published.close()

    asyncio.run(run())


def test_a_bad_endpoint_is_refused() -> None:
    async def run() -> None:
        with pytest.raises(InvalidOptionError, match="cannot publish KV events at nowhere"):
            ZmqEvents(EventLog(), "nowhere")

    asyncio.run(run())


def test_vllms_own_decoder_reads_a_batch() -> None:
    """msgspec with the classes that vLLM declares: a batch is an array, an event a tagged map."""
    msgspec = pytest.importorskip("msgspec")
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes | int]),
            ("parent_block_hash", bytes | int | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
        ],
        tag=True,
        omit_defaults=True,
    )
    batch = msgspec.defstruct(
        "KVEventBatch",
        [("ts", float), ("events", list[stored]), ("data_parallel_rank", int | None, None)],
        array_like=True,
    )
    _, payload = EventLog().append([BlockStored((2**64 - 1, 7), 3, tuple(range(32)), 16)])
    [event] = msgspec.msgpack.decode(payload, type=batch).events
    assert event.block_hashes == [2**64 - 1, 7] and event.token_ids == list(range(32)) and event.block_size == 16
