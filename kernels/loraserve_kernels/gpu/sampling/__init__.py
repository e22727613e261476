"""Sampling of tokens on the GPU."""
