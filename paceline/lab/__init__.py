"""The economics of speculative decoding, in plain numpy: nothing here needs an engine or a model.

expected.py        tokens per step of chains and trees
pass_cost.py       what a pass of n rows costs, as measured
live_pass_cost.py  the same curve, learned on from the passes of a running engine
speedup.py         whether speculation pays, and with how many tokens
money.py           dollars per million tokens
simulate.py        the accept/reject rule, played out against the theory
charts.py          pictures of all that, as SVG or PNG
"""
