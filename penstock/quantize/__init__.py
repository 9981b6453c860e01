"""Writes a quantized checkpoint from another one, a layer at a time."""
