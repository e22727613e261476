"""Inference requests, from body to last chunk: target, prompts, sampling,
generation and metering.
"""
