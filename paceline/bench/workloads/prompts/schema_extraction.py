"""Facts out of a text into a JSON schema that the answer is held to: keys and brackets are known beforehand."""

import json
from typing import Any

from paceline.bench.workloads.prompts import Task, Template


def _schema(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False
    }  # fmt: skip


def _text(longest: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": longest}


DATE = {"type": "string", "pattern": r"^20\d\d-[01]\d-[0-3]\d$"}
ORDER = _schema(
    customer=_text(30),
    items={
        "type": "array",
        "minItems": 2,
        "maxItems": 4,
        "items": _schema(
            name=_text(20), quantity={"type": "integer", "minimum": 1, "maximum": 99}, unit_price=_text(8)
        ),
    },
    delivery=_schema(method={"enum": ["courier", "pick-up", "post"]}, date=DATE),
    paid={"type": "boolean"},
)
TICKET = _schema(
    title=_text(60),
    severity={"enum": ["low", "medium", "high", "critical"]},
    component={"enum": ["login", "payments", "search", "mail", "other"]},
    reporter=_schema(name=_text(30), email=_text(40)),
    steps={"type": "array", "minItems": 2, "maxItems": 5, "items": _text(60)},
    reproducible={"type": "boolean"},
)

ORDER_TEXT = """Extract the order as JSON with the keys customer, items (name, quantity, unit_price), delivery \
(method, date) and paid.

{customer} wrote on Monday: please send {n} boxes of {a} at {price} euros each and two jars of {b} at 4.50 euros each. \
{how} on 2026-03-{day}. The invoice has {paid} been paid."""

TICKET_TEXT = """Turn this mail into a ticket: JSON with the keys title, severity, component, reporter (name, email), \
steps and reproducible.

From: {name} <{address}>
Hello, since this morning {what}. I opened the page, {then}, and got an error with the number {number}. I tried it \
twice, with the same result. My colleagues {others}. Please help soon, {urgency}."""

TASKS = [
    Task(
        Template(
            ORDER_TEXT,
            {
                "customer": ["Mrs. Haddad", "Mr. Lindqvist"],
                "n": ["three", "five"],
                "a": ["green tea", "pasta"],
                "price": ["6.20", "2.80"],
                "b": ["honey"],
                "how": ["A courier shall bring it", "We pick it up"],
                "day": ["12"],
                "paid": ["already"],
            },
        ),
        json.dumps(ORDER),
    ),
    Task(
        Template(
            TICKET_TEXT,
            {
                "name": ["Ines Duarte", "Karl Osei"],
                "address": ["support@shop.example"],
                "what": ["I cannot pay", "the search finds nothing", "no mail arrives"],
                "then": ["pressed the button", "filled in the form"],
                "number": ["502", "E17"],
                "others": ["see it too"],
                "urgency": ["a customer is waiting"],
            },
        ),
        json.dumps(TICKET),
    ),
]
