"""Execution of a step: batches as arrays, runners for CPU and GPU, and sampling."""
