"""Drafts from text that was seen before: the prompt, the output so far, past outputs, and what the client predicted."""
