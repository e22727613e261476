"""Tenants: identity, limits and billing."""
