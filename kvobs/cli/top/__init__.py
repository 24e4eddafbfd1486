"""Show each connector's numbers from servers' /metrics, between successive scrapes: ``kvobs top``."""
