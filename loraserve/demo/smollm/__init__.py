"""The demo's trained model: SmolLM2-135M-Instruct, and adapters that do one task each."""
