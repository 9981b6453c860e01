"""Conversations with known answers, from seeded generators: training data and gates of the model.

Each module owns one ability and has `sample(rng, held_out, thinking=None) -> Conversation`. Draws
with `held_out=False` and with `held_out=True` are disjoint, so memorized training data cannot pass
a gate.
"""
