"""Measures any server with the OpenAI API over HTTP: conformance, correctness, speed under load.

Knows nothing of engines or tensors, and counts tokens itself, so that every server is measured in
the same way.
"""
