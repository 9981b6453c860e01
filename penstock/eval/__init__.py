"""Measures a server from outside: conformance, problems and load, sent to any OpenAI API server
over HTTP.

Knows nothing of engines or tensors, and counts tokens for itself, so that every server is measured
alike.
"""
