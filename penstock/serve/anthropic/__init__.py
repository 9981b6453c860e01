"""Anthropic's Messages API: its requests become the `ChatRequest` that every API shares."""
