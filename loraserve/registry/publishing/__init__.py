"""Publishing: from uploaded or pulled bytes to a version that resolves."""
