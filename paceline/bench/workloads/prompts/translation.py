"""Short texts to be translated."""

from paceline.bench.workloads.prompts import Template

TEMPLATES = [
    Template(
        "Translate into {language}: {text}",
        {
            "language": ["French", "German", "Spanish", "Italian", "Portuguese"],
            "text": [
                "The train to the coast leaves at nine, but the ticket office opens only at ten.",
                "Please leave your shoes at the door and help yourself to tea in the kitchen.",
                "We repaired the roof last summer; this year it is the turn of the windows.",
                "My grandmother wrote letters every week and kept all the answers in a blue box.",
                "If the water is too cold, wait an hour: the sun warms the bay quickly.",
                "The museum is closed on Mondays, but the garden around it is always open.",
                "He forgot his umbrella on the bus and bought a new one at the market.",
                "Nobody knew who had painted the small picture above the stairs.",
            ],
        },
    ),
]
