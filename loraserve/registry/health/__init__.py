"""Health of versions.

It covers certificates, corruption and numeric failures, and whether a version can be served.
"""
