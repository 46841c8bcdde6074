"""A file and one change to it: most of the answer is already in the prompt."""

from paceline.bench.workloads.prompts import Template

CART = """class Cart:
    def __init__(self):
        self.items = []

    def add(self, name, price, quantity):
        self.items.append({"name": name, "price": price, "quantity": quantity})

    def remove(self, name):
        self.items = [item for item in self.items if item["name"] != name]

    def total(self):
        amount = 0
        for item in self.items:
            amount += item["price"] * item["quantity"]
        return amount

    def describe(self):
        lines = []
        for item in self.items:
            lines.append(item["name"] + " x " + str(item["quantity"]))
        return "\\n".join(lines)
"""

TEMPERATURES = """def read_temperatures(path):
    temperatures = []
    with open(path) as file:
        for line in file:
            station, value = line.split(",")
            temperatures.append((station, float(value)))
    return temperatures


def warmest(temperatures):
    best = temperatures[0]
    for entry in temperatures:
        if entry[1] > best[1]:
            best = entry
    return best


def average(temperatures):
    total = 0.0
    for station, value in temperatures:
        total += value
    return total / len(temperatures)
"""

QUEUE = """class TaskQueue:
    def __init__(self, limit):
        self.limit = limit
        self.tasks = []

    def put(self, task):
        if len(self.tasks) >= self.limit:
            raise ValueError("queue is full")
        self.tasks.append(task)

    def get(self):
        if not self.tasks:
            return None
        return self.tasks.pop(0)

    def size(self):
        return len(self.tasks)
"""

TEMPLATES = [
    Template(
        "Here is a Python file:\n\n```python\n{code}```\n\n{change} Print the whole file again with that change.",
        {
            "code": [CART, TEMPERATURES, QUEUE],
            "change": [
                "Add type hints to every function.",
                "Add a one-line docstring to every function.",
                "Rename the first function or method to something clearer.",
                "Raise a ValueError where an argument is None.",
                "Add a function called reset that empties the data.",
                "Change the quotes and names to follow one consistent style.",
                "Add a comment above every loop.",
                "Log a line with print at the start of each function.",
                "Make every function return early where it can.",
                "Sort the functions by name.",
                "Handle an empty collection without an exception.",
                "Add a main block that shows how to use the code.",
            ],
        },
    ),
]
