"""What the engine, the drafters and the server ask of a tokenizer. `models/tokenizer.py` is the one we ship."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    @property
    def eos_token_ids(self) -> Sequence[int]: ...

    @property
    def has_chat_template(self) -> bool: ...  # without one `chat_token_ids` raises

    @property
    def chat_template(self) -> str | None: ...  # its Jinja text

    def vocabulary(self) -> Mapping[str, int]: ...  # piece -> token id: equal where ids mean the same

    def definition(self) -> str: ...  # in the format of the `tokenizers` library (tokenizer.json)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str: ...  # of one token, its leading space kept

    def chat_token_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]: ...  # tools: for templates that tell the model of them
