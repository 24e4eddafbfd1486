"""Compute the order in which vLLM releases requests whose saves end in one step.

It is that of a set, by hashes and by how the set was made. With vLLM's own router each worker makes one, pickle makes
it anew, and the aggregator makes one of the requests that every rank has reported. Blocks are freed in its order: in
another one, later requests would get other block ids.
"""

from collections.abc import Iterable, Sequence
from itertools import chain


def released_set(ended: Iterable[str], by_rank: Iterable[Sequence[str]], *, is_aggregated: bool) -> set[str]:
    """Return ``ended`` as the set that vLLM would have made of the same reports.

    Args:
        ended: requests whose saves have all ended.
        by_rank: the requests whose saves each rank has reported in this step, in the order of its reports.
        is_aggregated: whether the workers' outputs went through an aggregator, and were pickled for it.
    """
    if not is_aggregated:
        return set(ended)
    # Iterators and lists below, as Python makes a set of a dict or of a set in another way.
    last: dict[str, None] = {}  # a request ends with the last rank that reports it
    for requests in by_rank:
        made_by_worker = set(requests)
        for request in set(iter(made_by_worker)):  # made anew by pickle
            last.pop(request, None)
            last[request] = None
    left = dict.fromkeys(ended)
    return set(chain((each for each in last if each in left), (each for each in left if each not in last)))
