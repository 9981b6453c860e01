"""Kernels in C++ for a CPU, for what torch's libraries do not have: a bf16 product that is not
rounded.

Compiled when first used, where there is a compiler; `ops/reference` does without them.
"""
