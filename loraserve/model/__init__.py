"""The base model: its config, checkpoint, layers, and the one decoder of every architecture."""
