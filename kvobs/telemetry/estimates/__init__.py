"""Estimate what loads gain, at which distances prompts repeat, and why connectors miss."""
