"""Benchmarks.

A package so that `benchmarks.gpu` is found whatever else of this name is installed.
"""
