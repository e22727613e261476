"""Backups of a registry and its blobs: made while servers run, verified, restored elsewhere."""
