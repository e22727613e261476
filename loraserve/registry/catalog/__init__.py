"""The catalog's entries beside versions.

They are aliases, metadata, grants, pins, deleted and shadowed versions.
"""
