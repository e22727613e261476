"""The load of one adapter: from the store's bytes to the packed tensors that kernels read."""
