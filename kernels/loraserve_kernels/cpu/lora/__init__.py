"""LoRA on the CPU: the layout of an adapter in memory, and its application to mixed rows."""
