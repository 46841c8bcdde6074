"""Grammars that outputs must follow, through llguidance: compiled once, walked along every draft tree.

compiler.py       a request's wish -> a compiled grammar, cached
grammar_text.py   the wish as a text for llguidance; over `tags.py`, `schema_check.py`
trial.py          a new text is made and compiled in `trial_process.py` first, so that none can hang or crash the engine
matching.py       one request's place in its grammar: tokens that may come, masks, pruning, forced tokens
tree_walk.py      how a matcher goes through a draft tree
beside_pass.py    the masks of a step, computed while the target runs

Nothing is imported here: the process of the trial loads a few of these files and is to be there quickly.
"""
