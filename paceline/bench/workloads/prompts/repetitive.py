"""Answers that repeat themselves: tables, lists and copies, where any lookup drafter shines."""

from paceline.bench.workloads.prompts import Template

TEMPLATES = [
    Template(
        "Repeat the following {kind} exactly {times} times, one after the other, and write nothing else:\n\n{text}",
        {
            "kind": ["line", "sentence"],
            "times": ["twenty", "thirty", "forty"],
            "text": [
                "All work and no play makes a long day for the team in the harbour office.",
                "SELECT name, price, stock FROM products WHERE stock > 0 ORDER BY price;",
                "<item><name>lamp</name><price>12.50</price><stock>4</stock></item>",
                "2024-03-01 12:00:00 INFO worker-1 finished job 17 in 42 ms",
                '{"id": 1, "status": "ok", "retries": 0, "region": "north"}',
                "the quick red fox runs over the bridge and under the bridge",
                "one potato, two potato, three potato, four; five potato, six potato, seven potato, more",
                "if (value == null) { throw new IllegalArgumentException(message); }",
                "She sells sea shells by the sea shore, and he sells tea shells by the tea store.",
                "GET /api/v2/orders?page=1&size=50 HTTP/1.1 200 1834",
                "north, north-east, east, south-east, south, south-west, west, north-west",
                "for (int i = 0; i < n; i++) { total += prices[i] * amounts[i]; }",
                "| 0001 | hammer | 14.90 | in stock | aisle 3 |",
                "Thank you for your order. It will leave our warehouse tomorrow morning.",
                "def area(width, height): return width * height",
                "Row, row, row your boat, gently down the stream",
                "export PATH=/usr/local/bin:/usr/bin:/bin; echo done",
                "monday tuesday wednesday thursday friday saturday sunday",
                '<a href="/start" class="button">Start here</a>',
                "I will not throw paper planes in class again.",
            ],
        },
    ),
    Template(
        "Write the multiplication table of {number} from 1 to {end}, one line per product, as in '{number} x 1 = "
        "{number}'.",
        {"number": ["6", "7", "8", "9", "11", "12", "13", "14"], "end": ["20", "30"]},
    ),
]
