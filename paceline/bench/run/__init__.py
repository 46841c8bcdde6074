"""Running a load against our engine or any OpenAI-compatible server, and keeping what was measured."""
