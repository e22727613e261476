"""Limits: requests and tokens per minute, requests at once, and shares of what a server holds."""
