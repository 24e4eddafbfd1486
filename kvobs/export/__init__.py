"""Turn payloads into metrics and spans: in the API server, or in a separate process."""
