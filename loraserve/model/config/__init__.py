"""config.json as checked values."""
