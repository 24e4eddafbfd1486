"""Replay recorded lookups and loads under other settings: `kvobs whatif`."""
