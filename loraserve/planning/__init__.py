"""Plan a server's memory before it is started: from files' headers, without torch,
by the engine's own rules.
"""
