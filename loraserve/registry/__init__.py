"""The registry: names, versions and digests of adapters.

Uses SQL and the store, but neither torch nor HTTP.
"""
