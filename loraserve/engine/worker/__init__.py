"""The engine process: its start, its loop, and its background threads."""
