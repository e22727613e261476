"""KV blocks: which are free, idle or held, and which answer the prefix of a later prompt."""
