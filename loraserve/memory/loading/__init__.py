"""One adapter's way from the store's bytes to what kernels read."""
