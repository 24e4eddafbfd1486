"""Run a real vLLM server on a CPU with kvobs and two real KV connectors, and show what they did: ``kvobs demo``."""
