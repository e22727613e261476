"""Kernels for the CPU: numba where it is installed, PyTorch otherwise."""
