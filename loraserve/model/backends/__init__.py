"""Backends: how a device computes linears, norms and attention."""
