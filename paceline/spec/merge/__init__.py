"""Several drafters in one tree, and what each of them is worth."""
