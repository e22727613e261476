"""Devices that hold resident adapters, and the copies to them."""
