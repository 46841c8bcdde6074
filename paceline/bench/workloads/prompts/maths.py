"""Word problems, answered step by step."""

from paceline.bench.workloads.prompts import Template

TEMPLATES = [
    Template(
        "{who} buys {n} notebooks at {price} euros each and pays with a {note} euro note. A third of the change "
        "goes into a savings box. How much money is left in the purse? Think step by step.",
        {
            "who": ["Lena", "Omar"],
            "n": ["4", "6", "7"],
            "price": ["2.50", "1.75"],
            "note": ["20", "50"],
        },
    ),
    Template(
        "A {vehicle} travels {a} kilometres in {b} hours, rests for half an hour and then covers {c} kilometres "
        "at the same speed. How long does the whole journey take? Show each step.",
        {"vehicle": ["bus", "cyclist"], "a": ["60", "45"], "b": ["2", "3"], "c": ["90", "30", "75"]},
    ),
    Template(
        "Solve for x and check the result: {left} = {right}.",
        {"left": ["3x + 7", "5(x - 2)", "2x - 9 + x", "4x / 2 + 6"], "right": ["22", "2x + 13", "31", "x + 19"]},
    ),
]
