"""Report the end of a request to every child, and merge their params for the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvobs.children.child import Child

if TYPE_CHECKING:
    from vllm.v1.request import Request

Params = dict[str, Any]  # kv_transfer_params for the client
BlockIds = tuple[list[int], ...]  # per KV cache group


def finish_all(
    children: Sequence[Child], request: Request, block_ids: BlockIds, *, all_support_hma: bool
) -> tuple[set[int], Params | None]:
    """Report the end of the request to every child; return the children that promise a save, and the merged params.

    As in vLLM, the same one of two hooks is called for all children, chosen by ``all_support_hma``.

    Raises:
        RuntimeError: two children return the same key; names both and the key.
        ValueError: the request has several KV cache groups, but a child supports only one.
    """
    if not all_support_hma and len(block_ids) != 1:
        raise ValueError(
            f"not every connector supports more than one KV cache group, and request {request.request_id} has "
            f"{len(block_ids)}: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    promised: set[int] = set()
    merged: Params | None = None
    owners: dict[str, str] = {}
    for child in children:
        promises, params = (
            child.request_finished_all_groups(request, block_ids)
            if all_support_hma
            else child.request_finished(request, block_ids[0])
        )
        if promises:
            promised.add(child.index)
        if params is not None:
            _refuse_clash(owners, child, params)
            owners.update(dict.fromkeys(params, child.name))
            merged = {**(merged or {}), **params}
    return promised, merged


def _refuse_clash(owners: dict[str, str], child: Child, params: Params) -> None:
    clashes = sorted(set(owners) & set(params))
    if clashes:
        listed = ", ".join(f"{key!r} (from {owners[key]!r} and {child.name!r})" for key in clashes)
        raise RuntimeError(
            f"two connectors return the same key of kv_transfer_params: {listed}. A client can't distinguish them; "
            "configure one of them only"
        )
