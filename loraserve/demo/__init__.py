"""The bundled demo: a tiny base with seven adapters.

It has how they were trained, and a tour that checks them.
"""
