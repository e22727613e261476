"""Linears on the GPU with weights as they are stored, quantized or not."""
