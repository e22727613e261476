"""Products of tiles of a linear's output channels; compiled by numba."""
