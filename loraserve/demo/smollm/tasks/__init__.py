"""Tasks of the demo's adapters: questions drawn from a seed, and judges of the answers' truth."""
