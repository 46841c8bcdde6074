"""Functions to be written from a description."""

from paceline.bench.workloads.prompts import Template

TEMPLATES = [
    Template(
        "Write a {language} function that {task}. Include {extra}.",
        {
            "language": ["Python", "JavaScript", "Go", "Rust"],
            "task": [
                "returns the longest run of equal items in a list",
                "checks whether brackets in a string are balanced",
                "merges two sorted arrays into one sorted array",
                "counts how often each word occurs in a text",
                "converts a Roman numeral to an integer",
                "finds the first missing positive integer in a list",
                "rotates a square matrix by ninety degrees",
                "groups strings that are anagrams of each other",
                "finds the second largest number in a list",
                "removes duplicates from a list and keeps the order",
                "computes the edit distance of two words",
                "prints the first n prime numbers",
                "flattens a nested list",
                "reverses the words of a sentence",
                "parses a date in the form YYYY-MM-DD",
                "finds all pairs of numbers that add up to a target",
            ],
            "extra": ["a docstring or comment", "three unit tests"],
        },
    ),
    Template(
        "Write a Python class called {name} with the methods {methods}. Add type hints.",
        {
            "name": ["Inventory", "EventQueue", "Playlist", "BankAccount", "Library", "Roster"],
            "methods": ["add, remove and total", "push, pop and peek", "save, load and clear", "find, count and sort"],
        },
    ),
]
