"""C++ kernels for CPUs, for what the libraries of torch lack, such as an unrounded bf16 product.

Compiled on first use, if there is a compiler; `ops/reference` works without them.
"""
