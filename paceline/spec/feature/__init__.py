"""Drafts from trained heads on the target's hidden states: Medusa, EAGLE-1/2/3 and DFlash."""
