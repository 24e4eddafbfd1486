"""Observe the router: counts of transfers, spans, reports of requests; and carry the numbers to the API server."""
