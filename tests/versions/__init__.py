"""Serve with real engines of every vLLM version that can run on a CPU: ``make test-all ONLY=versions``."""
