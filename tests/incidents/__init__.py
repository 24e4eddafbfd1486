"""Incidents on real engines: a connector that hangs, raises, or ends its process, and who names it."""
