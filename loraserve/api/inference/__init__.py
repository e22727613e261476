"""Inference requests, from the body to the engine's requests; `answering` has the way back."""
