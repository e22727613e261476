"""Parts of the bundled pack's training: its text, its tokenizer, the loop."""
