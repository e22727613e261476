"""Verification: an adapter's logits in the engine compared with a reference evaluation."""
