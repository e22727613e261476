"""Commands on tenants, their keys and their grants."""
