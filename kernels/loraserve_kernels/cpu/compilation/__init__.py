"""Compile the CPU's kernels once for a machine: a cache on disk that all processes share."""
