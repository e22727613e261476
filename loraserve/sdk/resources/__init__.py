"""Resources of the API: one module per noun."""
