"""Everyday questions and advice."""

from paceline.bench.prompts import Template

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
            ],
            "reader": ["a curious ten-year-old", "a colleague over coffee", "someone who dislikes science"],
        },
    ),
    Template(
        "I have {time} free in {place} and I like {interest}. What should I do? Give me a short plan.",
        {
            "time": ["one afternoon", "a rainy weekend", "three days"],
            "place": ["Lisbon", "a small mountain village", "Copenhagen"],
            "interest": ["old buildings", "good food", "walking", "live music"],
        },
    ),
    Template(
        "Write a short, polite message to {whom} about {matter}.",
        {
            "whom": ["my landlord", "a new neighbour", "my team at work"],
            "matter": ["a leaking tap", "a party on Saturday", "moving a meeting to Thursday", "a lost parcel"],
        },
    ),
]
