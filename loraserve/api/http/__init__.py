"""HTTP below the routes: bounded connections, the outermost middleware, JSON bodies and server-sent events."""
