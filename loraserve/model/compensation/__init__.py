"""Rounding to int4 by what a base computes on calibration text, into a checkpoint of its own."""
