"""Choices of tokens from logits on a CPU."""
