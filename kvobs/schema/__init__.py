"""Declare options, metrics, spans and findings once, in tables that all others read."""

__version__ = "0.2.0"
"""The version of kvobs, as in its package's metadata."""
