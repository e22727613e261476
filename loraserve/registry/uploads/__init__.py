"""Uploads and downloads under way, whole or in pieces."""
