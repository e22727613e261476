"""The catalog's entries beside versions: aliases, metadata, grants, pins,
deleted and shadowed versions.
"""
