"""Bases in llama.cpp's files, GGUF: config, tokenizer and weights as the loader reads them."""
