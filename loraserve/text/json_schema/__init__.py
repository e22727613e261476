"""JSON schemas as llguidance takes them: bounded, with unenforceable parts found and named."""
