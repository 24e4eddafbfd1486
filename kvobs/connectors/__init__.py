"""Call the configured connectors: each built, gated, its hooks bound and every call recorded."""
