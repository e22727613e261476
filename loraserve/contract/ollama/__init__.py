"""Shapes of the answers that Ollama's clients read."""
