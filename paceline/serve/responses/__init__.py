"""OpenAI's Responses API over the same calls as chat: another form of the request, the answer and its events."""
