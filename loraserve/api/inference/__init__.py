"""One inference request, from its body to its last chunk: target, prompts, sampling, generation and metering."""
