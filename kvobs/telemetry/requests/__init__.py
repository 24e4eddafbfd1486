"""Follow single requests: traces, reports, the request log."""
