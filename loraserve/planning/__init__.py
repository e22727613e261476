"""Plan a server's memory before it is started.

This goes by files' headers, without torch, by the engine's own rules.
"""
