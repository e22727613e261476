"""Execution of a step: batches as arrays, the CPU's and the GPU's runner, and sampling."""
