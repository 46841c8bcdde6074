"""Text to token ids and back, over the `tokenizers` library, from a model folder or a GGUF file.

>>> tokenizer = Tokenizer.from_folder(path)
>>> tokenizer.decode(tokenizer.encode("Hello"))
'Hello'
>>> tokenizer.chat_token_ids([{"role": "user", "content": "Hi"}])
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import InvalidRequestError, ModelLoadError
from paceline.models.chat_template import ChatTemplate, Message, plain_messages
from paceline.models.config import eos_token_ids, read_json
from paceline.models.control_tokens import ControlTokens
from paceline.models.gguf_tokenizer import SPACE_PIECE, build_tokenizer, tokenizer_config

LONG_TEXT = 10_000  # characters from which on other threads may run meanwhile: only the batch call lets them


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],  # "bos_token" -> "<s>", ...
        eos_token_ids: Sequence[int],
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        bos = special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.chat_template = chat_template
        self._chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens)
        self.control_tokens = ControlTokens(backend)
        self._token_texts: dict[int, str] = {}
        self._single_texts: dict[tuple[int, bool], str] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        backend = _read_backend(folder / "tokenizer.json")
        path = folder / "tokenizer_config.json"
        config = read_json(path) if path.is_file() else {}
        special_tokens = {
            name: _token_text(value)
            for name, value in config.items()
            if name.endswith("_token") and isinstance(value, (str, Mapping))
        }
        return cls(
            backend,
            special_tokens=special_tokens,
            eos_token_ids=_folder_eos(folder, backend, special_tokens.get("eos_token")),
            chat_template=_folder_chat_template(folder, config.get("chat_template")),
        )

    @classmethod
    def from_gguf(cls, path: Path) -> "Tokenizer":
        from paceline.models.gguf_file import GgufFile

        file = GgufFile(path)
        config = tokenizer_config(file)
        return cls(
            build_tokenizer(file),
            special_tokens={name: value for name, value in config.items() if name.endswith("_token")},
            eos_token_ids=file.eos_token_ids,
            chat_template=config.get("chat_template"),
        )

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def vocabulary(self) -> dict[str, int]:
        """Piece -> token id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    def definition(self) -> str:
        """The whole tokenizer, as the `tokenizers` library writes it."""
        return self.backend.to_str()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) < LONG_TEXT:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if len(token_ids) != 1:
            return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        # A stream asks for the text of its newest token alone every time: at most the vocabulary is remembered.
        key = (token_ids[0], skip_special_tokens)
        text = self._single_texts.get(key)
        if text is None:
            text = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
            self._single_texts[key] = text
        return text

    def token_text(self, token_id: int) -> str:
        """One token as text, its leading space kept; half a character shows as the replacement character."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._make_token_text(token_id)
        return text

    def _make_token_text(self, token_id: int) -> str:
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return ""  # some models have more rows in the head than tokens
        if SPACE_PIECE in piece:  # SentencePiece: decode() would drop the leading space
            return piece.replace(SPACE_PIECE, " ")
        return self.backend.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Any = None,
        template_options: Mapping[str, Any] | None = None,  # such as {"enable_thinking": False} for Qwen3
    ) -> str:
        if self._chat_template is None:
            raise InvalidRequestError(
                "this model has no chat template, so it cannot take messages: send a plain prompt instead"
            )
        options = {"tools": tools, **(template_options or {})}
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, options=options)

    def chat_token_ids(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Any = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The chat as token ids. The template alone writes special tokens: none are added, none come from messages."""
        plain = plain_messages(messages)  # parts are joined first: two of them must not spell a token together
        mark = None
        if self.control_tokens.found_in([plain, tools]):
            (plain, tools), mark = self.control_tokens.mark([plain, tools])
        text = self.apply_chat_template(plain, add_generation_prompt, tools=tools, template_options=template_options)
        if mark is None:
            return self.encode(text, add_special_tokens=False)
        return self.control_tokens.encode(text, mark)


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelLoadError(
            f"{path} is missing. If the folder has another kind of tokenizer, make one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
        )
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelLoadError(f"{path} cannot be read ({error}). Fetch the model again.") from error


def _folder_eos(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """From generation_config.json, config.json or the tokenizer's own end token, whichever comes first."""
    files = [read_json(path) if path.is_file() else {} for path in _config_paths(folder)]
    if found := eos_token_ids(config=files[1], generation=files[0]):
        return found
    token = None if eos_token is None else backend.token_to_id(eos_token)
    return () if token is None else (token,)


def _config_paths(folder: Path) -> tuple[Path, Path]:
    return folder / "generation_config.json", folder / "config.json"


def _folder_chat_template(folder: Path, configured: Any) -> str | None:
    """chat_template.jinja, else the entry of tokenizer_config.json: a text, or several of which one is the default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured}
        return named.get("default")
    return configured if isinstance(configured, str) else None


def _token_text(value: str | Mapping[str, Any]) -> str:
    return value if isinstance(value, str) else str(value["content"])
