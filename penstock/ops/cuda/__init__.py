"""CUDA C++ kernels, where Triton gives too little control over which thread holds which element.

NVRTC, which comes with PyTorch, compiles them on first use. Without it, only `ops/triton` is used.
"""
