"""Prometheus metrics, collected at each scrape."""
