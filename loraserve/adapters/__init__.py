"""Adapters: files read, configs checked, both compiled to one intermediate form.

NumPy, no torch.
"""
