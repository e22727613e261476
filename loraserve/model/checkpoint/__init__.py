"""Checkpoints: headers, stored weights, and the loader that streams them into a resident
decoder.
"""
