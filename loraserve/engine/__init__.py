"""The engine: one process that schedules requests and runs the model.

Uses torch, but neither SQL nor HTTP.
"""
