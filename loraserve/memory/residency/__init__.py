"""Residency of adapters: which are in memory, which come next, and which leave."""
