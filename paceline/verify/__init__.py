"""The proof behind `paceline verify`: on this machine, with this model, speculation changes nothing but the speed.

enumeration.py   exact output distributions of the real rules, every random decision taken both ways
rules.py         ... for every rule, over random targets, drafters, trees and options
workload.py      prompts and sampling settings, and plain decoding as the truth
passes.py        hand-made passes over the decoder
bits.py          a row's logits, bit for bit, in chunks, among other rows and in trees
equality.py      greedy and seeded output against plain decoding, token for token; how many differ (share.py), and where
forcing.py       each emitted token is the target's own choice, or tied with it within rounding (rounding.py)
distribution.py  what the engine samples on the real model, against the model's own distribution
plan.py          what --quick, the default and --thorough look at
verdict.py       what all of it has proved: bits, agreement within rounding, or that something is broken
"""
