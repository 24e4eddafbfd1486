"""The end of a request: tell every child, and merge what they hand to the client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvobs.children import Child

if TYPE_CHECKING:
    from vllm.v1.request import Request

Params = dict[str, Any]  # kv_transfer_params for the client
BlockIds = tuple[list[int], ...]  # per KV cache group


def tell_all(children: Sequence[Child], request: Request, block_ids: BlockIds) -> tuple[set[int], Params | None]:
    """Tell every child that the request is over; return which children promise a save, and the merged params.

    Raises:
        RuntimeError: two children return the same key; names both and the key.
    """
    promised: set[int] = set()
    merged: Params | None = None
    owners: dict[str, str] = {}
    for child in children:
        promises, params = _tell(child, request, block_ids)
        if promises:
            promised.add(child.index)
        if params is not None:
            _refuse_clash(owners, child, params)
            owners.update(dict.fromkeys(params, child.name))
            merged = {**(merged or {}), **params}
    return promised, merged


def _tell(child: Child, request: Request, block_ids: BlockIds) -> tuple[bool, Params | None]:
    """Call the one of the two hooks that vLLM would call if this child were alone."""
    finish: Callable[..., tuple[bool, Params | None]]
    if child.supports_hma:
        finish = child.request_finished_all_groups
        return finish(request, block_ids)
    if len(block_ids) != 1:
        raise ValueError(
            f"connector {child.name!r} supports one KV cache group, and request {request.request_id} has "
            f"{len(block_ids)}: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    finish = child.request_finished
    return finish(request, block_ids[0])


def _refuse_clash(owners: dict[str, str], child: Child, params: Params) -> None:
    clashes = sorted(set(owners) & set(params))
    if clashes:
        listed = ", ".join(f"{key!r} (from {owners[key]!r} and {child.name!r})" for key in clashes)
        raise RuntimeError(
            f"two connectors return the same key of kv_transfer_params: {listed}. A client could not tell them "
            "apart; keep one of them"
        )
