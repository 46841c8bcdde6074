"""The two ends of the scale: `none` drafts nothing, `oracle` drafts the truth with a chosen accuracy."""
