"""Check that an installation can serve, and that the running server has its settings.

Loads no torch: a child process does.
"""
