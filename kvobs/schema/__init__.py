"""Declare options, metrics, spans and findings once, in tables that all others read."""
