"""Repeat lookups that were not waited for until the connector answers, then give it 0 tokens.

A connector that gets 0 tokens before it has answered keeps the locks of its lookup (LMCache: until a TTL of ten
minutes). It never sees the request as scheduled, since it knows none of its blocks. This is the only call that kvobs
makes and vLLM does not, and only if an option says not to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvobs.children.child import Child
from kvobs.routing.visibility import Visibility


class _Open(NamedTuple):
    """The arguments of a lookup."""

    request: Any
    blocks: Any
    computed: int  # tokens that vLLM had computed itself


class OpenLookups:
    """The open lookups of all live requests, by child and request."""

    def __init__(self, children: Sequence[Child], visibility: Sequence[Visibility]) -> None:
        self._children = children
        self._visibility = visibility
        self._open: dict[tuple[int, str], _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def has(self, child: int, request_id: str) -> bool:
        """Return whether a child has not answered yet."""
        return (child, request_id) in self._open

    def leave_open(self, request: Any, blocks: Any, computed: int, children: Iterable[int]) -> None:
        """Note at a request's allocation which children have not answered."""
        for child in children:
            self._visibility[child].withhold(request.request_id, taints=False)
            self._open[child, request.request_id] = _Open(request, blocks, computed)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or is looked up again by vLLM."""
        if self._open:
            for key in [key for key in self._open if key[1] == request_id]:
                del self._open[key]

    def poll(self, blocks_step: Callable[[int], bool]) -> None:
        """Repeat the lookups; give 0 tokens to children that have answered.

        ``blocks_step`` returns whether a child is not asked now because its last call took too long.
        """
        for (index, request_id), (request, blocks, computed) in list(self._open.items()):
            if blocks_step(index):
                continue
            child = self._children[index]
            tokens, _ = child.get_num_new_matched_tokens(request, computed)
            if tokens is not None:
                del self._open[index, request_id]
                child.update_state_after_alloc(request, blocks, 0)
