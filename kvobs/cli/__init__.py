"""Implement the command ``kvobs``: check, top, summary, trace, timeline, dashboards and the demo."""

from kvobs.cli.commands import app

__all__ = ["app"]
