"""Read vLLM's log: the newest message, and the exception behind a failure."""

import re
from collections.abc import Sequence

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINE = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:INFO|WARNING|ERROR) \S+ \S+ \[[^]]*\] (?P<message>.*\S)")
"""vLLM's own log lines: `(EngineCore pid=7) INFO 11-20 14:04:31 [core.py:144] message`."""
PROCESS = re.compile(r"^\([^)]*pid=\d+\) ")
EXCEPTION = re.compile(r"^(?P<what>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception): .*\S)")
CONSEQUENCE = re.compile(r"[Ss]ee (?:root cause|stack trace)|EngineDead")


def newest_message(lines: Sequence[str]) -> str:
    """Return the message of the newest log line that is one, without process, time and file."""
    found = (LINE.match(line) for line in reversed(lines))
    return next((match["message"].strip() for match in found if match), "")


def root_cause(log: str) -> str:
    """Return the last exception in a log that isn't merely the consequence of another, or nothing.

    The end of vLLM's log rarely shows it: each process up the tree repeats that the one below it failed.
    """
    cause, chained = "", False
    for line in COLOUR.sub("", log).splitlines():
        match = LINE.match(line)
        message = match["message"] if match else PROCESS.sub("", line)
        if message.startswith("The above exception was the direct cause"):
            chained = True
        elif (found := EXCEPTION.match(message)) and not CONSEQUENCE.search(found["what"]):
            cause = cause if chained else found["what"]
            chained = False
    return cause
