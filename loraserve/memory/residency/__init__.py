"""Residency of adapters: which are on the device and in host memory, which come next, and which leave."""
