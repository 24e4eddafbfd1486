"""Check a ``--kv-transfer-config`` before it starts: `kvobs check`."""
