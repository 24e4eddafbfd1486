"""Carry the numbers to the API server: their form on the wire, merging, rebuilding."""
