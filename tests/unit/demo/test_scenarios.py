"""The demo's faults: their configurations start, and what shows them is found in /metrics."""

from pathlib import Path

import pytest
from prometheus_client.samples import Sample

from kvobs.demo.run import files, host_memory, multi_connector, with_fault
from kvobs.demo.scenarios import FAULTS, evidence
from kvobs.schema.config import read


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_the_demos_configuration_is_valid_with_each_fault_and_without(fault: str | None, tmp_path: Path) -> None:
    config = with_fault(FAULTS[fault], tmp_path) if fault else multi_connector(host_memory(), files(tmp_path))
    extra = config["kv_connector_extra_config"]
    assert read(extra).names == ("cpu", "disk")
    assert extra["connectors"][0]["kv_connector_extra_config"].get("fault") == fault


def test_a_histogram_is_printed_as_its_mean_over_all_engines_and_what_is_zero_is_not() -> None:
    labels = {"model_name": "m", "connector": "cpu", "mode": "async"}
    samples = [
        Sample("kvobs_load_duration_seconds_sum", {**labels, "engine": "0"}, 3.0),
        Sample("kvobs_load_duration_seconds_count", {**labels, "engine": "0"}, 2.0),
        Sample("kvobs_load_duration_seconds_sum", {**labels, "engine": "1"}, 1.0),
        Sample("kvobs_load_duration_seconds_count", {**labels, "engine": "1"}, 2.0),
        Sample("kvobs_load_duration_seconds_count", {**labels, "connector": "disk"}, 0.0),
        Sample("kvobs_loads_total", {**labels, "outcome": "ok"}, 4.0),
        Sample("kvobs_loads_total", {**labels, "outcome": "failed"}, 0.0),
        Sample("kvobs_lookups_total", {"connector": "cpu", "outcome": "hit"}, 4.0),
    ]
    assert list(evidence(FAULTS["slow-connector"], samples)) == [
        'kvobs_loads_total{connector="cpu", mode="async", outcome="ok"} 4',
        'kvobs_load_duration_seconds{connector="cpu", mode="async"} 1 s on average, 4 times',
    ]
