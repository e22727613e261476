"""The catalog's entries apart from versions.

They are aliases, metadata, grants, pins, deleted and shadowed versions.
"""
