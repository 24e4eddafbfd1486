"""Build and call the configured connectors: each is gated, its hooks are bound, every call is recorded."""
