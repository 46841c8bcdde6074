"""The tokenizer inside a GGUF file, rebuilt for the `tokenizers` library.

GGUF knows two kinds that matter here. `gpt2` is byte-level BPE: vocabulary and merges are stored, the way text is cut
beforehand is only named (`tokenizer.ggml.pre`), so the cuts are in a table below. `llama` is SentencePiece's BPE:
pieces with scores and no merges; a pair may be merged when the joined piece exists, the best score first, and what no
piece covers falls back to bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.errors import ModelLoadError, UnsupportedModelError
from paceline.models.gguf_file import GgufFile

# gguf's token types
CONTROL, USER_DEFINED = 3, 4
SPACE_PIECE = "▁"

LLAMA3_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_CUT = LLAMA3_CUT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_CUT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How text is cut before byte-level BPE."""

    regex: str | None = None  # None: GPT-2's own
    single_digits: bool = False
    whole_pieces: bool = False  # a piece that is a token stays whole, whatever the merges say
    compose: bool = False  # Unicode NFC first
    adds_bos: bool = False  # where the file does not say


CUTS = {
    "default": Cut(),
    "gpt-2": Cut(),
    "smollm": Cut(single_digits=True),
    "llama-bpe": Cut(LLAMA3_CUT, whole_pieces=True, adds_bos=True),
    "llama-v3": Cut(LLAMA3_CUT, whole_pieces=True, adds_bos=True),
    "llama3": Cut(LLAMA3_CUT, whole_pieces=True, adds_bos=True),
    "smaug-bpe": Cut(LLAMA3_CUT, whole_pieces=True),  # SmolLM3
    "qwen2": Cut(QWEN2_CUT, compose=True),
    "deepseek-r1-qwen": Cut(QWEN2_CUT, compose=True, adds_bos=True),
    "tekken": Cut(TEKKEN_CUT, whole_pieces=True, adds_bos=True),
}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    kind = file.field("tokenizer.ggml.model")
    tokens = file.field("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError(f"{file.path} holds no tokenizer. Convert the model anew, with its vocabulary.")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, tokens), True
    else:
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of kind {kind!r}, which is not supported. Known: gpt2, llama."
        )
    _add_special_tokens(tokenizer, tokens, file.field("tokenizer.ggml.token_type", []))
    if file.field("tokenizer.ggml.add_bos_token", adds_bos):
        _prepend_bos(tokenizer, tokens, file.field("tokenizer.ggml.bos_token_id"))
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """What a Hugging Face folder keeps in tokenizer_config.json."""
    tokens = file.field("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in names.items():
        token = file.field(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token < len(tokens):
            config[name] = tokens[token]
    if template := file.field("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _byte_level(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, bool]:
    name = file.field("tokenizer.ggml.pre", "default")
    if name not in CUTS:
        raise UnsupportedModelError(
            f"{file.path} cuts text by the rule {name!r}, which is not supported. Known: {', '.join(CUTS)}."
        )
    cut = CUTS[name]
    merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges", [])]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut.whole_pieces))
    if cut.compose:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if cut.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.regex:
        steps.append(pre_tokenizers.Split(Regex(cut.regex), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.adds_bos


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    scores = file.field("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ModelLoadError(f"{file.path} has {len(tokens)} tokens but {len(scores)} scores. Fetch the file again.")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = file.field("tokenizer.ggml.unknown_token_id", 0)
    merges = [pair for _, pair in sorted(_merges(vocabulary, scores), key=lambda merge: -merge[0])]
    model = models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = bool(file.field("tokenizer.ggml.add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE_PIECE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_PIECE), *spaces] if prefix else spaces)
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE_PIECE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> Iterator[tuple[float, tuple[str, str]]]:
    """(score, (left, right)) for every way to join two pieces into a third."""
    for piece, token in vocabulary.items():
        for cut in range(1, len(piece)):
            if piece[:cut] in vocabulary and piece[cut:] in vocabulary:
                yield scores[token], (piece[:cut], piece[cut:])


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _prepend_bos(tokenizer: Tokenizer, tokens: list[str], bos: int | None) -> None:
    if bos is None:
        return
    token = tokens[bos]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, bos)]
    )
