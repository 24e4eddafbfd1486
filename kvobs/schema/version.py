"""The version of kvobs."""

__version__ = "0.1.0"
"""The version of kvobs, as in its package's metadata."""
