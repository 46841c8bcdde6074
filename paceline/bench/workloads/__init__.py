"""What is asked of the engine: prompts by category, shipped with us or read from a file."""
