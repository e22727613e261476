"""An adapter's files: safetensors headers checked before any tensor is read, and the names of
tensors.
"""
