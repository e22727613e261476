# Generated from loraserve/sdk/_async/__init__.py by tools/generate_sync_sdk.py (make sdk): don't edit.
"""The blocking client."""
