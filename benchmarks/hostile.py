"""Friendly streams beside attackers: does anybody notice? A real server, on loopback only; Linux.

    python benchmarks/hostile.py [--seconds 600] [--streams 16] [--attack NAME ...] [--json FILE]

Friendly clients read greedy and seeded answers, back to back, each under a `cache_salt` of its own: otherwise the
drafters would know the repeated answers by heart, and passes of hundreds of draft rows would hide what an attack adds.
Attacks (hostile_attacks.py) take turns beside them, with quiet slices in between. Every friendly text must be the one
that the quiet server gave before. A gap between two events of a stream counts for the attack under way when the later
one came; a slice ends only once every friendly stream was heard again. A server that died is started again, and the run
goes on. The server's pool of keys and values is small: it fills up as a cache does, and what else grows is to show.

| column         | meaning                                                                                     |
|----------------|---------------------------------------------------------------------------------------------|
| p50 .. longest | gaps between two events of a friendly stream                                                |
| added, over    | longest gap less the longest quiet one (`before`, `none`); gaps more than 50 ms above it    |
| first, health  | longest wait for a first event, and for `/health`, asked every 50 ms on a new connection    |
| stall, others  | how late the measuring process was at worst; share of the CPU that other programs took      |
| right, bad     | friendly answers; the bad ones were wrong or lost                                           |
| MiB, peak      | what the memory of the server grew by, and its highest                                      |

Prints a table, then one JSON line. The exit code is 1 where a target was missed.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path

from hostile_attacks import ATTACKS
from hostile_report import report
from hostile_trial import Trial

from paceline.bench.run.provenance import provenance


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--seconds", type=float, default=600, help="at least one turn of every attack")
    parser.add_argument("--streams", type=int, default=16, help="of friendly clients")
    parser.add_argument("--num-kv-blocks", type=int, default=2048, help="of the server's pool")
    parser.add_argument("--attack", action="append", choices=list(ATTACKS), metavar="NAME", help="only this one")
    parser.add_argument("--json", metavar="FILE", help="write the JSON line there too")
    parser.add_argument("--log", default="hostile-benchmark.log", help="the server's log")
    args = parser.parse_args()
    result = asyncio.run(Trial(args).run())
    reached = report(result)
    record = json.dumps({"result": result, **provenance(vars(args))})
    print(record)
    if args.json:
        Path(args.json).write_text(record + "\n")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
