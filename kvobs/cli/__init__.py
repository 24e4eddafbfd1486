"""The command ``kvobs``: check, top, timeline, dashboards and the demo."""

from kvobs.cli.commands import app

__all__ = ["app"]
