"""An agent's loop: calls of functions as JSON, each turn with the calls and results before it.

The turns of a loop are prompts of their own, with a history that we wrote. So every method and every server answers the
same turns, whatever a model says, and a turn finds its history in the prefix cache as it does in an agent.
"""

import itertools
import json
from typing import Any

from paceline.bench.workloads.prompts import Turn


def _function(name: str, **arguments: Any) -> dict[str, Any]:
    schema = {
        "type": "object", "properties": arguments, "required": list(arguments), "additionalProperties": False
    }  # fmt: skip
    return {"name": name, "parameters": schema}


TEXT = {"type": "string", "maxLength": 40}
DATE = {"type": "string", "pattern": r"^2026-[01]\d-[0-3]\d$"}
FUNCTIONS = [
    _function("search_trains", origin=TEXT, destination=TEXT, date=DATE),
    _function("book_train", train_id=TEXT, passenger=TEXT, seat={"enum": ["window", "aisle", "any"]}),
    _function("send_mail", to=TEXT, subject=TEXT, text={"type": "string", "maxLength": 160}),
]
SYSTEM = (
    "You are a travel agent. You work by calling functions. Answer every message with exactly one call, as a JSON "
    'object with the keys "name" and "arguments". The functions:\n'
    + "\n".join(json.dumps(function) for function in FUNCTIONS)
)


def _call_schema(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": function["parameters"]},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


SCHEMA = json.dumps({"anyOf": [_call_schema(function) for function in FUNCTIONS]})


def _call(name: str, **arguments: str) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def _loop(origin: str, destination: str, day: int, passenger: str) -> list[Turn]:
    date = f"2026-05-{day:02}"
    trains = [
        {"train_id": f"{origin[:2].upper()}{day}{hour}", "origin": origin, "destination": destination, "date": date,
         "departure": f"{hour:02}:40", "price": f"{20 + 3 * hour}.00"}
        for hour in (8, 13, 18)
    ]  # fmt: skip
    cheapest = trains[0]["train_id"]
    asked = (
        f"Find a train from {origin} to {destination} on {date}, book the cheapest one for {passenger} with a window "
        f"seat, and confirm it by mail to {passenger.split()[0].lower()}@office.example."
    )
    booked = {"booking": f"B-{cheapest}", "train_id": cheapest, "passenger": passenger, "seat": "window", "date": date}
    said = [
        ("system", SYSTEM),
        ("user", asked),
        ("assistant", _call("search_trains", origin=origin, destination=destination, date=date)),
        ("user", f"Result of search_trains:\n{json.dumps(trains, indent=1)}"),
        ("assistant", _call("book_train", train_id=cheapest, passenger=passenger, seat="window")),
        ("user", f"Result of book_train:\n{json.dumps(booked, indent=1)}"),
    ]
    return [Turn(tuple(said[:end]), said[end][1], SCHEMA) for end in (1, 3, 5)]


JOURNEYS = [("Porto", "Lisbon"), ("Ghent", "Antwerp"), ("Turin", "Milan")]
PASSENGERS = ["Marta Lind", "Tom Okafor"]
LOOPS = [
    _loop(*journey, day, passenger) for journey, day, passenger in itertools.product(JOURNEYS, (4, 19), PASSENGERS)
]
