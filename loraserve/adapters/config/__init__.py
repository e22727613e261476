"""An adapter's config: which fields and kinds are served, and how its patterns are matched."""
