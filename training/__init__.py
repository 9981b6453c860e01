"""Trains the embedded model: the architecture in differentiable torch, data, training loop, export.

Not part of the wheel, and not imported by `penstock`. The only output is a model folder on disk.
"""
