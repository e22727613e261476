"""`make gpu`: what the GPU's kernels compute, held against float64, and how fast, held against what
the machine can do. See README.md beside this file.
"""
