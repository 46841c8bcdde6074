"""What programs written for Hugging Face's tokenizers call, in terms of the few methods that ours has.

>>> tokenizer(["Hello", "Hi"])["input_ids"]                                          # doctest: +SKIP
>>> tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import tokenizers

from paceline.core.option_values import shown
from paceline.errors import InvalidOptionError
from paceline.models.chat_template import Message

# Arguments of `__call__` and `apply_chat_template` for what is not made here, and values that ask for none of it.
_NOT_MADE: dict[str, tuple[Any, ...]] = {
    "padding": (None, False, "do_not_pad"),
    "truncation": (None, False, "do_not_truncate"),
    "max_length": (None,),
    "return_tensors": (None,),
    "return_dict": (None, False),
    "return_assistant_tokens_mask": (None, False),
    "tokenizer_kwargs": (None, {}),
}


class HFTokenizer(ABC):
    backend: tokenizers.Tokenizer
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]  # "bos_token" -> "<s>", ...
    vocab_size: int
    chat_template: str | None  # Jinja

    is_fast = True
    padding_side = "left"

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    @abstractmethod
    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Any = None,
        template: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> str: ...

    @abstractmethod
    def chat_token_ids(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]: ...

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own, else the first of those that end an answer."""
        return self._special_id("eos_token", self.eos_token_ids[0] if self.eos_token_ids else None)

    @property
    def pad_token_id(self) -> int | None:
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._special_id("unk_token")

    @property
    def eos_token(self) -> str | None:
        return None if self.eos_token_id is None else self.backend.id_to_token(self.eos_token_id)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens.get("unk_token")

    @property
    def all_special_ids(self) -> list[int]:
        added = self.backend.get_added_tokens_decoder()
        return sorted(token_id for token_id, token in added.items() if token.special)

    @property
    def all_special_tokens(self) -> list[str]:
        added = self.backend.get_added_tokens_decoder()
        return [added[token_id].content for token_id in self.all_special_ids]

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any
    ) -> dict[str, list[int] | list[list[int]]]:
        """Token ids, and a mask of ones. Padding, truncation and tensors are not made: refused where asked for."""
        asked = {name: value for name, value in options.items() if value not in (None, False, "do_not_pad")}
        asked.pop("return_attention_mask", None)
        if asked:
            _refuse(*next(iter(asked.items())))
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        batch = [self.encode(one, add_special_tokens) for one in text]
        return {"input_ids": batch, "attention_mask": [[1] * len(ids) for ids in batch]}

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items()}

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        to_token = self.backend.id_to_token
        return to_token(ids) if isinstance(ids, int) else [to_token(one) for one in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        to_id = self.backend.token_to_id
        return to_id(tokens) if isinstance(tokens, str) else [to_id(one) for one in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Any = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **template_options: Any,
    ) -> Any:
        """One conversation's token ids (or its text), or a list of them for several."""
        for name, nothing in _NOT_MADE.items():
            if name in template_options and (value := template_options.pop(name)) not in nothing:
                _refuse(name, value)
        options: dict[str, Any] = {
            "tools": tools,
            "template": chat_template,
            "continue_final_message": continue_final_message,
            "template_options": template_options,
        }
        make = self.chat_token_ids if tokenize else self.chat_text
        if conversation and not isinstance(conversation[0], Mapping):
            return [make(one, add_generation_prompt, **options) for one in conversation]  # type: ignore[arg-type]
        return make(conversation, add_generation_prompt, **options)  # type: ignore[arg-type]

    def info(self) -> dict[str, Any]:
        """What tokenizer_config.json would say, of what clients ask for."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": self.vocab_size,
            "chat_template": self.chat_template,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "unk_token": self.unk_token,
        }

    def _special_id(self, name: str, default: int | None = None) -> int | None:
        token = self.special_tokens.get(name)
        found = None if token is None else self.backend.token_to_id(token)
        return default if found is None else found


def _refuse(name: str, value: Any) -> NoReturn:
    raise InvalidOptionError(f"{name}={shown(value)} is not supported: a call gives lists of token ids")
