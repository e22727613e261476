"""HTTP below the routes: bounded connections, the guard, JSON bodies and server-sent events."""
