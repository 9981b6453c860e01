"""Measures a model from outside: problems with known answers, sent to any server of the OpenAI API over HTTP.

Knows nothing of engines, tokens or tensors, so that every server is measured alike.
"""
