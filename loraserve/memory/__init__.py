"""Memory of a device and of the host: one arena, and the residency of adapters."""
