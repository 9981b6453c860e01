"""Trains the embedded model: the architecture in differentiable torch, its data, the run and the
export.

Not part of the wheel. Nothing in `penstock` imports this; the only way out is a model folder on
disk.
"""
