"""Time and count the calls into connectors."""
