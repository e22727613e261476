"""Layers of the decoder: linears, norms, rotary positions, MLPs and experts."""
