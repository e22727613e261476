"""Tenants' files, and batches of requests in them: checked, computed last, resumed after a kill."""
