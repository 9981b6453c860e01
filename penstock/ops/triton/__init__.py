"""The kernels: the same files, functions and signatures as `ops/reference`, for a GPU."""
