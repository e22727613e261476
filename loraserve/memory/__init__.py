"""Memory of a device and of the host: one arena for KV blocks and adapters, and the residency of adapters."""
