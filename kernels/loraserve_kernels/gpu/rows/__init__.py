"""Row-wise kernels between the linears: norms, rotary positions and activations."""
