"""Scheduling: which requests take part in the next step, and what a step's results do to them."""
