"""Tool calls in a model's text: a module per family, each with its parser and its grammar."""
