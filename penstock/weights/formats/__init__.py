"""Quantized safetensors, one module per format. They turn parts into weights; none opens a file."""
