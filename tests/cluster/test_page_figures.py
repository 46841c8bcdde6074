"""What the live page shows of a cluster."""

import asyncio
import json

from paceline.cluster.page_figures import page_figures
from tests.cluster.fake_engine import BLOCK
from tests.cluster.rig import cluster, prompts

PROMPT = prompts(1, 6 * BLOCK + 5)[0]


def test_the_page_shows_workers_transfers_prefixes_and_where_a_request_went_and_why() -> None:
    async def run() -> None:
        async with cluster("prefill", "decode", "decode") as rig:
            await rig.ask(PROMPT, "a-request-with-a-long-name")
            worker = rig.ingress.placer.placed[-1].worker_id
            while rig.ingress.placer.decode.num_held(worker) < 6:
                await asyncio.sleep(0.005)
            shown = page_figures(rig.ingress)
            json.dumps(shown)
            assert {row["worker"]: row["role"] for row in shown["workers"]} == {
                "prefill0": "prefill",
                "decode1": "decode",
                "decode2": "decode",
            }
            assert {row["worker"]: row["num_blocks"] for row in shown["workers"]}[worker] == 6
            [request] = shown["requests"]
            assert request["request_id"] == "ong-name"  # not all of it: other tenants see the page
            assert (request["worker"], request["prefill_worker"], request["attempt"]) == (worker, "prefill0", 1)
            assert request["num_fetched_blocks"] == 6
            assert request["reason"] == "policy: always remote; transfer complete"
            [prefix] = shown["prefixes"]
            assert prefix["holders"] == {"prefill0": 6, worker: 6} and prefix["num_requests"] == 1

    asyncio.run(run())


def test_a_worker_that_is_away_is_shown_with_the_reason_and_its_streams_are_counted() -> None:
    async def run() -> None:
        async with cluster("decode", "decode", router="round_robin", step_s=0.01) as rig:
            asking = asyncio.create_task(rig.ask(PROMPT, max_tokens=40))
            while not rig.node("decode0").engine.running:
                await asyncio.sleep(0.005)
            await rig.node("decode0").kill()
            await asking
            shown = page_figures(rig.ingress)
            [away] = [row for row in shown["workers"] if not row["up"]]
            assert (away["worker"], away["why"]) == ("decode0", "the other side closed the connection")
            assert shown["num_resumed"] == 1 and shown["recovery_p50_s"] > 0
            assert [row["attempt"] for row in shown["requests"]] == [2, 1]

    asyncio.run(run())
