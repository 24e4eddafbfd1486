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
    """A lookup that was left open: its arguments, the allocated blocks, and the children that have not answered."""

    request: Any
    computed: int  # tokens that vLLM had computed itself
    blocks: Any
    children: list[int]


class OpenLookups:
    """The open lookups of all live requests."""

    def __init__(self, children: Sequence[Child], visibility: Sequence[Visibility]) -> None:
        self._children = children
        self._visibility = visibility
        self._open: dict[str, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def has(self, child: int, request_id: str) -> bool:
        """Return whether a child has not answered yet."""
        lookup = self._open.get(request_id)
        return lookup is not None and child in lookup.children

    def leave_open(self, request: Any, blocks: Any, computed: int, children: Iterable[int]) -> None:
        """Note at a request's allocation which children have not answered."""
        if silent := list(children):
            for child in silent:
                self._visibility[child].withhold(request.request_id, taints=False)
            self._open[request.request_id] = _Open(request, computed, blocks, silent)

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, or is looked up again by vLLM."""
        self._open.pop(request_id, None)

    def poll(self, blocks_step: Callable[[int], bool]) -> None:
        """Repeat the lookups; give 0 tokens to children that have answered.

        ``blocks_step`` returns whether a child is not asked now because its last call took too long.
        """
        for request_id, (request, computed, blocks, children) in list(self._open.items()):
            for index in children.copy():
                if blocks_step(index):
                    continue
                child = self._children[index]
                tokens, _ = child.get_num_new_matched_tokens(request, computed)
                if tokens is not None:
                    children.remove(index)
                    child.update_state_after_alloc(request, blocks, 0)
            if not children:
                del self._open[request_id]
