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
    def sample(series: str, value: float, **labels: str) -> Sample:
        return Sample(f"kvobs_{series}", {"model_name": "m", "connector": "cpu", "mode": "async", **labels}, value)

    samples = [
        sample("load_duration_seconds_sum", 3, engine="0"), sample("load_duration_seconds_count", 2, engine="0"),
        sample("load_duration_seconds_sum", 1, engine="1"), sample("load_duration_seconds_count", 2, engine="1"),
        sample("load_duration_seconds_count", 0, connector="disk"), sample("loads_total", 4, outcome="ok"),
        sample("loads_total", 0, outcome="failed"), sample("lookups_total", 4, outcome="hit"),
    ]  # fmt: skip
    assert list(evidence(FAULTS["slow-connector"], samples)) == [
        'kvobs_loads_total{connector="cpu", mode="async", outcome="ok"} 4',
        'kvobs_load_duration_seconds{connector="cpu", mode="async"} 1 s on average, 4 times',
    ]
