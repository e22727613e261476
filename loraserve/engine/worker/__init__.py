"""The engine process: its start, its loop, and the threads beside it."""
