"""Evaluation of versions on a file of data: its lines, the requests, and the metrics."""
