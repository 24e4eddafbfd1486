"""What an engine says about itself in the pages of all its processes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import vllm

from kvobs.connector.wiring import engine_info
from kvobs.page.description import ConnectorInfo
from kvobs.schema import __version__
from kvobs.schema.options import Options
from kvobs.telemetry.tracing.sampling import TracingSettings
from kvobs.testing import engine_config, entry_of, transfer_config
from kvobs.testing.scripted import Script
from tests.support.contexts import TRACING


def test_an_engine_describes_itself_as_its_metrics_show_it() -> None:
    specs: Any = [
        SimpleNamespace(name=name, connector_class=cls, transfer_config=SimpleNamespace(kv_role=role))
        for name, cls, role in (("cpu", int, "kv_both"), ("far", str, "kv_consumer"))
    ]
    transfer = transfer_config("kvobs", [entry_of(Script("a"))], engine_id="engine_dp3")
    config = engine_config(transfer, 4)
    config.parallel_config.data_parallel_index = config.parallel_config.data_parallel_rank = 3
    info = engine_info(specs, Options(link_gbps={"far": 400}, load_policy="longest"), config, TRACING)
    assert info.connectors == (
        ConnectorInfo("cpu", "int", "kv_both", None),
        ConnectorInfo("far", "str", "kv_consumer", 400),
    )
    assert (info.index, info.ranks, info.load_policy, info.failure_policy) == (3, 4, "longest", "recompute")
    assert (info.vllm_version, info.kvobs_version) == (vllm.__version__, __version__)
    assert (info.has_spans, info.endpoint) == (True, TRACING.endpoint)
    assert info.model


@pytest.mark.parametrize("tracing", [replace(TRACING, is_on=False), TRACING])
def test_readers_know_whether_spans_are_to_be_exported(tracing: TracingSettings) -> None:
    config = engine_config(transfer_config("kvobs", [entry_of(Script("a"))]))
    assert engine_info([], Options(), config, tracing).has_spans is tracing.is_on
