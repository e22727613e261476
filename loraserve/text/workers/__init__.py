"""Processes for a client's hostile work: each may be killed at any time, and is started again."""
