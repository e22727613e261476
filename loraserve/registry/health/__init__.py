"""Health of versions: certificates, corruption and numeric failures,
and whether a version can be served.
"""
