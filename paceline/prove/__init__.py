"""The proof behind `paceline verify`: on this machine, with this model, speculation changes nothing but the speed.

enumeration.py   exact output distributions of the real rules, every random decision taken both ways
rules.py         ... for every rule, over random targets, drafters, trees and options
workload.py      prompts and sampling settings, and plain decoding as the truth
equality.py      greedy and seeded output against plain decoding, token for token
forcing.py       each emitted token is the target's argmax, or tied with it within rounding
distribution.py  what the engine samples on the real model, against the model's own distribution
plan.py          what --quick, the default and --thorough look at
"""
