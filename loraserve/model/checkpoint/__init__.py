"""Checkpoints: headers, stored weights, and the loader.

It streams them into a resident decoder.
"""
