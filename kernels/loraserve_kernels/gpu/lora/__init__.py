"""LoRA on the GPU: shrink, expand, and rows that an adapter replaces."""
