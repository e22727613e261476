"""Garbage collection of blobs that nothing refers to, and the claim of a registry on its store."""
