"""Inference requests, from body to last chunk.

The modules are target, prompts, sampling, generation and metering.
"""
