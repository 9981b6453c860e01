"""C++ kernels for CPUs, for what torch's libraries lack, such as a bf16 GEMM without rounding.

Compiled on first use, if there is a compiler; `ops/reference` works without them.
"""
