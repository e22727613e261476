"""The engine: one process that schedules requests and runs the model.

Knows torch; knows no SQL and no HTTP.
"""
