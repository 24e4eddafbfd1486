"""Record how many tokens the connectors store, as far as their options state it."""

from __future__ import annotations

from collections.abc import Sequence

from kvobs.connectors.specs import STATED_BYTES, STORES_MORE, ChildSpec, name_among
from kvobs.faults import contained
from kvobs.probe.recorder import Recorder
from kvobs.schema import signals


@contained("record")
def record_sizes(
    recorder: Recorder, specs: Sequence[ChildSpec], bytes_per_token: float, ranks: int, copies: int
) -> None:
    """Record how many tokens each connector stores, if its options state it.

    A token takes ``bytes_per_token`` on all ranks together, 0 if unknown; ``copies`` ranks have the same KV cache.
    """
    for spec in specs if bytes_per_token else ():
        options, name = spec.transfer_config.kv_connector_extra_config, name_among(spec.connector_class, STATED_BYTES)
        is_unclear = name == "OffloadingConnector" and copies == ranks > 1  # with MLA it may store one copy
        if name is None or is_unclear or any(map(options.get, STORES_MORE)):
            continue
        if key := next(filter(options.get, STATED_BYTES[name]), None):
            size = int(options[key]) * (ranks if STATED_BYTES[name][key] else 1) / bytes_per_token
            recorder.set_gauge(spec.index, signals.slot(signals.CAPACITY_TOKENS), int(size))
