"""Answers: chunks of the engine in, bytes of a dialect out, each token billed.

`Generation` merges the engine's chunks, an `Answer` renders them, a `Delivery` writes and bills.
"""
