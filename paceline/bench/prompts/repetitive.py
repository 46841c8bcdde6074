"""Answers that repeat themselves: tables, lists and copies, where any lookup drafter shines."""

from paceline.bench.prompts import Template

TEMPLATES = [
    Template(
        "Repeat the following {kind} exactly {times} times, one after the other, and write nothing else:\n\n{text}",
        {
            "kind": ["line", "sentence"],
            "times": ["twenty", "thirty"],
            "text": [
                "All work and no play makes a long day for the team in the harbour office.",
                "SELECT name, price, stock FROM products WHERE stock > 0 ORDER BY price;",
                "<item><name>lamp</name><price>12.50</price><stock>4</stock></item>",
                "2024-03-01 12:00:00 INFO worker-1 finished job 17 in 42 ms",
                '{"id": 1, "status": "ok", "retries": 0, "region": "north"}',
                "the quick red fox runs over the bridge and under the bridge",
                "one potato, two potato, three potato, four; five potato, six potato, seven potato, more",
                "if (value == null) { throw new IllegalArgumentException(message); }",
            ],
        },
    ),
    Template(
        "Write the multiplication table of {number} from 1 to {end}, one line per product, as in '{number} x 1 = "
        "{number}'.",
        {"number": ["7", "8", "12", "13"], "end": ["20", "30"]},
    ),
]
