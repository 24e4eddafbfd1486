"""The size of a connector's store is a gauge where its options state all of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.connectors.capacity import record_sizes
from kvobs.probe.recorder import Recorder

OF_ALL, OF_EACH = {"cpu_bytes_to_use": "8000"}, {"cpu_bytes_to_use_per_rank": 4000}
STATED: list[tuple[str, dict[str, Any], int, int]] = [
    ("OffloadingConnector", OF_ALL, 2, 1000),
    ("OffloadingConnector", OF_ALL, 4, 0),
    ("OffloadingConnector", OF_ALL | {"secondary_tiers": [{"type": "fs"}]}, 1, 0),
    ("SimpleCPUOffloadConnector", OF_ALL, 4, 1000),
    ("SimpleCPUOffloadConnector", OF_ALL | OF_EACH, 1, 2000),
    ("NixlConnector", OF_ALL, 1, 0),
]


@pytest.mark.parametrize(("name", "options", "copies", "tokens"), STATED)
def test_a_size_is_known_if_options_state_all_of_it(name: str, options: Any, copies: int, tokens: int) -> None:
    """Of four ranks, on which a token takes 8 bytes."""
    recorder, transfer = Recorder(1), SimpleNamespace(kv_connector_extra_config=options)
    spec: Any = SimpleNamespace(index=0, connector_class=type(name, (), {}), transfer_config=transfer)
    record_sizes(recorder, [spec], 8.0, 4, copies)
    assert sum(recorder.take().gauges.values()) == tokens
