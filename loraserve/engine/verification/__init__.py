"""Verification: an adapter's answers compared with a plain evaluation of the same weights."""
