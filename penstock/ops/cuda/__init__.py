"""Kernels in CUDA C++, for what Triton cannot be told: which thread holds which element.

Compiled when first used, by the library that PyTorch brings along; where that is missing,
`ops/triton` does without them.
"""
