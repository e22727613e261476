"""Paged attention on the GPU."""
