"""Shapes of the HTTP API's answers, each held once: the server sends them, the SDK returns them.

A class names the fields in the order in which they are sent. It reads more than the server sends:
fields that an older server lacks have defaults, and fields of a newer one are kept.
"""
