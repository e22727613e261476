# Generated from loraserve/sdk/_async/__init__.py by `make sdk`: don't edit.
"""The blocking client."""
