"""The HTTP server: OpenAI's routes, the management API, and what carries them."""
