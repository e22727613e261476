"""Stored responses, which later ones continue: each tenant's own, bounded, and for a time."""
