"""Linears on the CPU: candidates per weight format, and the choice among them."""
