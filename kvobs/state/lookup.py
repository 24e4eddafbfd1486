"""What a request's last lookup has found, for those that record it: each child's answer, and which one was chosen."""

from __future__ import annotations

from typing import NamedTuple

NOBODY = -1
"""Instead of the child that was chosen."""


class Answer(NamedTuple):
    """A child's answer: ``tokens`` beyond those computed, or None while it has said "not yet" only.

    ``since_ns`` is the time of its first "not yet", in ns since the epoch (0: it answered at once), and ``waited_ns``
    the time from then to its answer, or to the allocation that did not wait for it.
    """

    child: int
    tokens: int | None
    is_async: bool
    since_ns: int = 0
    waited_ns: int = 0


class Lookup(NamedTuple):
    """The last lookup before vLLM allocates the request's blocks.

    ``local`` are the tokens in vLLM's own cache, ``chosen`` the child whose offer the router gave to vLLM. A child that
    was not asked, or whose answers about the request do not count, is not among the answers.
    """

    local: int
    answers: tuple[Answer, ...] = ()
    chosen: int = NOBODY
