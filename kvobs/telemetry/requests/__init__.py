"""Report single requests: to their clients, and in the request log."""
