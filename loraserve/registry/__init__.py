"""The registry: names, versions and digests of adapters.

Knows SQL and the store; knows no torch and no HTTP.
"""
