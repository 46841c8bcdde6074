"""Drafts from a language model: a separate one, or some of the layers of the target."""
