"""A text to be made shorter: names and phrases of the answer stand in the prompt."""

from paceline.bench.workloads.prompts import Template

LIGHTHOUSE = (
    "The lighthouse at Skarvik was built in 1874 after eleven ships were lost on the reef in a single winter. For "
    "ninety years a keeper lived there with his family, winding the clockwork every four hours and writing the "
    "weather into a ledger. When the light was automated in 1964 the last keeper, Anna Thorsen, moved to the "
    "village but rowed out every Sunday to clean the lens. The ledgers, forty-one volumes, were nearly thrown "
    "away; a schoolteacher kept them in her attic. Climate researchers now use them because they are the longest "
    "unbroken weather record on that coast."
)
GARDEN = (
    "The community garden behind the old tram depot began with six raised beds and a borrowed water tank. In its "
    "third year more than two hundred people hold a key to the gate, and the waiting list is longer than the "
    "member list. The city offered to double the land if the garden would take over the neglected strip along the "
    "canal. Members were divided: some feared the work, others saw room for an orchard. In March they voted, 121 "
    "to 48, to accept, on condition that the city repairs the canal wall first."
)
BATTERY = (
    "Engineers at a ferry company replaced two diesel engines with a battery the size of a shipping container. "
    "The crossing takes twenty-two minutes and the battery charges for nine minutes at each end, which is almost "
    "exactly the time that loading takes. In the first winter the range fell by a fifth because the battery had "
    "to heat itself. The crew learned to plug the ship in overnight at a low current, which keeps the cells warm, "
    "and the losses shrank to a twentieth. Fuel costs fell by seventy per cent; the noise, passengers say, is "
    "what they noticed first."
)

TEMPLATES = [
    Template(
        "{task}\n\n{text}",
        {
            "task": [
                "Summarize the following text in two sentences.",
                "List the five most important facts of the following text as bullet points.",
                "Write a headline and one sentence for the following text.",
                "Retell the following text for a child in four sentences.",
                "Which numbers occur in the following text, and what does each stand for?",
                "Summarize the following text as a short news item.",
                "Write three questions that the following text answers, with their answers.",
                "Shorten the following text to about half its length, keeping its own words where you can.",
                "Name everyone and everything that acts in the following text and say what each did.",
                "Put the events of the following text in order of time, one line each.",
                "State the main point of the following text, then the two strongest details.",
            ],
            "text": [LIGHTHOUSE, GARDEN, BATTERY],
        },
    ),
]
