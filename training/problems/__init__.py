"""Conversations with known answers, drawn from a seeded generator: what the tiny model learns and
is asked.

Each module owns one ability and gives `sample(rng, held_out, thinking=None) -> Conversation`. Draws
with `held_out=False` and with `held_out=True` never meet, so memory of the training data cannot
pass a gate.
"""
