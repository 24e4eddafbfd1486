"""Check a ``--kv-transfer-config`` before vLLM starts: `kvobs check`."""
