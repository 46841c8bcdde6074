"""Prompts as dictionaries, by vLLM's names."""

from typing import NotRequired, TypedDict

__all__ = ["TextPrompt", "TokensPrompt"]


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str | None]  # only prompts with the same salt share prefixes and past outputs
    output_token_ids: NotRequired[
        list[int] | list[list[int]] | None
    ]  # ours: output that was delivered; with n: n lists


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]  # the text that they were made of, for whoever reads the output
    cache_salt: NotRequired[str | None]
    output_token_ids: NotRequired[list[int] | list[list[int]] | None]
