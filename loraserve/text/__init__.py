"""Text to tokens and back: tokenizer, incremental detokenizer, chat template.

No torch, no transformers.
"""
