"""Propose tokens that requests probably sample next, so that one step verifies several."""
