"""Identity: tenants, their keys, and the caller behind a bearer secret."""
