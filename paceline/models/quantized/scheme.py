"""How a checkpoint was quantized, whatever format says so."""

import re
from dataclasses import dataclass

WHOLE_ROW = -1  # group size: one scale for a whole output


@dataclass(frozen=True, slots=True)
class Scheme:
    method: str  # awq, gptq, fp8 or compressed-tensors
    layout: str  # how the tensors lie: awq, gptq, gptq_v2, packed, int8 or float8
    bits: int = 8
    group_size: int = WHOLE_ROW
    symmetric: bool = True
    block: tuple[int, int] | None = None  # float8: rows and columns under one scale; None: whole rows or all
    not_quantized: tuple[str, ...] = ()  # modules: parts of a name, or "re:" and a regular expression
    exact_names: bool = False  # `not_quantized` has whole names of modules

    def __str__(self) -> str:
        return f"{self.method} {self.bits}-bit"

    def skips(self, module: str) -> bool:
        """Whether the config says that this module keeps its plain weight."""
        return any(self._matches(name, module) for name in self.not_quantized)

    def _matches(self, name: str, module: str) -> bool:
        if name.startswith("re:"):
            return re.match(name.removeprefix("re:"), module) is not None
        return name == module if self.exact_names else name in module
