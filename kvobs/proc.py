"""Read what Linux says of a process."""

from pathlib import Path


def stat(pid: int) -> tuple[str, list[str]]:
    """Return a process's name and its /proc fields from the state on; OSError if it has ended."""
    # The name, in parentheses, may hold anything: the fields begin after the last one.
    name, _, fields = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
    return name, fields.split()
