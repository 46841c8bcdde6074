"""Everyday questions and advice."""

from paceline.bench.workloads.prompts import Template

TEMPLATES = [
    Template(
        "Explain {topic} to {reader}. Keep it friendly and under ten sentences.",
        {
            "topic": [
                "why the sky changes colour at sunset",
                "how bread dough rises",
                "what inflation does to savings",
                "how a bicycle stays upright",
                "why cats knead blankets",
                "how noise-cancelling headphones work",
                "why leaves turn red in autumn",
                "how vaccines teach the body",
                "what a black hole is",
                "how tides come about",
                "why onions make us cry",
                "how a search engine finds pages",
                "why ice floats",
                "how compound interest works",
                "what yeast does in beer",
                "how birds find their way south",
                "why we dream",
                "how a fridge gets cold",
            ],
            "reader": ["a curious ten-year-old", "a colleague over coffee", "someone who dislikes science"],
        },
    ),
    Template(
        "I have {time} free in {place} and I like {interest}. What should I do? Give me a short plan.",
        {
            "time": ["one afternoon", "a rainy weekend", "three days"],
            "place": ["Lisbon", "a small mountain village", "Copenhagen", "Kyoto", "Edinburgh"],
            "interest": ["old buildings", "good food", "walking", "live music", "bookshops"],
        },
    ),
    Template(
        "Write a short, polite message to {whom} about {matter}.",
        {
            "whom": ["my landlord", "a new neighbour", "my team at work", "the school office", "an old friend"],
            "matter": [
                "a leaking tap",
                "a party on Saturday",
                "moving a meeting to Thursday",
                "a lost parcel",
                "borrowing a ladder",
                "a change of address",
                "a noisy printer",
                "thanks for last week",
            ],
        },
    ),
]
