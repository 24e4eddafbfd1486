"""Observe the router: counts, spans, estimates and reports of requests; and carry the connectors' own stats."""
