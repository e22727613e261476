"""A step's kernels, one after the other, in one region of threads."""
