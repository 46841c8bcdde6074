"""Tool calls: how they are asked for, held to their schemas, and found in what a model writes."""
