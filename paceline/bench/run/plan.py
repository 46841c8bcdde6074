"""What a resumable measurement was to be, said before its first run and kept in every record.

A claim with intervals needs a number of rounds that was fixed beforehand: who looks at the figures and then adds rounds
to the cells that failed will see them hold. So a file of records belongs to one plan. A call that asks for anything
else (more rounds, fewer cells, other settings), or runs other code or another machine, is refused before it measures.
"""

from collections.abc import Mapping
from typing import Any

from paceline.bench.run.provenance import code, provenance
from paceline.bench.run.results import RecordFile
from paceline.errors import InvalidOptionError

Plan = dict[str, Any]


def make_plan(arguments: Mapping[str, Any]) -> Plan:
    """`arguments`: all that decide what is measured, ready for JSON."""
    return {"arguments": dict(arguments), "code": code(), "cpu": provenance()["machine"]["cpu"]}


def check_plan(records: RecordFile, plan: Plan) -> None:
    for record in records.records:
        earlier = record.get("plan")
        if earlier == plan:
            continue
        raise InvalidOptionError(
            f"{records.path} holds records of another plan: {_difference(earlier, plan)}. Rounds are fixed beforehand, "
            f"for all cells, on one version of the code: go on as it was begun, or give another --out"
        )


def _difference(earlier: Plan | None, plan: Plan) -> str:
    if earlier is None:
        return "they have none"
    before, now = ({**one["arguments"], "code": one["code"], "cpu": one["cpu"]} for one in (earlier, plan))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name)!r}, now {now.get(name)!r}" for name in names)
