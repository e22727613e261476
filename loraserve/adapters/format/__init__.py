"""An adapter's files.

safetensors headers are checked before any tensor is read, and so are the names of tensors.
"""
