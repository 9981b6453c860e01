"""Kernels in CUDA C++, for control that Triton does not give: which thread holds which element.

Compiled on first use by NVRTC, which comes with PyTorch; without it, `ops/triton` is used alone.
"""
