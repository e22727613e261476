"""Pages of adapters in the GPU's memory."""
