"""Loads weights from files, or from a seed, into the parameters of a model."""
