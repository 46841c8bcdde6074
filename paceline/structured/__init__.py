"""Grammars that outputs must follow, through llguidance: compiled once, walked along every draft tree.

compiler.py       a request's wish -> a compiled grammar, cached; over `grammar_text.py`, `tags.py`, `schema_check.py`
trial.py          the same once before in a process that can be ended, so that no text can hang or crash the engine
matching.py       one request's place in its grammar: masks for the nodes of a tree, pruning, forced tokens
beside_pass.py    the masks of a step, computed while the target runs
"""

from paceline.structured.beside_pass import MaskMaker
from paceline.structured.compiler import Grammars
from paceline.structured.limits import GrammarLimits

__all__ = ["GrammarLimits", "Grammars", "MaskMaker"]
