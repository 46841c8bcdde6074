"""Drafts from what the target itself guessed in earlier passes: token recycling and lookahead."""
