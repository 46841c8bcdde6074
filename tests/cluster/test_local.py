"""When a local worker that ended is started again, and how their number changes."""

import sys
import time

from paceline.cluster.local import LONGEST_PAUSE_S, SOUND_S, LocalWorker, LocalWorkers


def pauses(lives_s: list[float]) -> list[float]:
    """Before each restart of a worker that lives for so long each time."""
    worker, now_s, found = LocalWorker("w", "decode", ["true"]), 0.0, []
    for life_s in lives_s:
        worker.begin_s, now_s = now_s, now_s + life_s
        worker.plan_restart(now_s)
        assert worker.due_s is not None
        found.append(worker.due_s - now_s)
        now_s = worker.due_s
    return found


def test_a_worker_that_lived_for_a_while_is_started_again_at_once() -> None:
    assert pauses([SOUND_S, SOUND_S, 10 * SOUND_S]) == [0.0, 0.0, 0.0]


def test_one_that_keeps_dying_waits_longer_each_time_up_to_a_limit() -> None:
    found = pauses([1.0] * 9)
    assert found == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_after_a_sound_life_the_count_begins_again() -> None:
    assert pauses([1.0, 1.0, 1.0, SOUND_S, 1.0, 1.0]) == [0.0, 1.0, 2.0, 0.0, 0.0, 1.0]


# Says where it "listens" and ends with its parent; SIGTERM ends it, as it ends a worker that has drained.
QUICK = [sys.executable, "-c", "import sys; print('{\"port\": 7}', flush=True); sys.stdin.read()"]


def test_the_number_of_workers_of_a_role_can_be_changed_while_they_run() -> None:
    workers = LocalWorkers([LocalWorker("prefill-0", "prefill", QUICK), LocalWorker("decode-1", "decode", QUICK)])
    workers.start()
    try:
        workers.scale("decode", 3)
        assert [worker.name for worker in workers.workers] == ["prefill-0", "decode-1", "decode-2", "decode-3"]
        workers.scale("decode", 1)
        end_s = time.monotonic() + 10
        while len(workers.workers) > 2 and time.monotonic() < end_s:
            time.sleep(0.02)
        assert [worker.name for worker in workers.workers] == ["prefill-0", "decode-1"]
        workers.scale("decode", 2)
        assert workers.workers[-1].name == "decode-4"  # no name is used twice
        processes = [worker.process for worker in workers.workers]
    finally:
        workers.end()
    assert all(process is not None and process.poll() is not None for process in processes)
