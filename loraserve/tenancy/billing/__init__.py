"""Billing: usage is counted to the token, kept through a kill, and summed by the hour."""
