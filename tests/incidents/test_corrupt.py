"""A connector whose loads succeed and bring other requests' blocks is named everywhere, and no other is."""

from pathlib import Path

import pytest

from kvobs.demo.run import host_memory
from tests.engine.exported import with_exporter
from tests.engine.metered import configuration
from tests.engine.serving import ServedEngine, prompt
from tests.incidents.known import CORRUPT
from tests.incidents.watching import watched

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = 4


def test_wrong_bytes_are_seen(served_engine: ServedEngine, tmp_path: Path) -> None:
    remote, trigger = host_memory(), tmp_path / "trigger"
    more = {"spec_name": "ShiftingSpec", "spec_module_path": "tests.incidents.faulty", "trigger": str(trigger)}
    remote["kv_connector_extra_config"] |= more
    config = configuration(remote, host_memory(), names=["remote", "cpu"])
    config["kv_connector_extra_config"]["kvobs"] |= {"verify": {"sample_ratio": 1.0}}
    config, port = with_exporter(config)
    with served_engine(config, ranks=2) as server:
        for number in range(PROMPTS):
            server.complete(prompt("incident", number), 2)
        for is_wrong in (False, True):
            server.reset_prefix_cache()
            with watched(server, port, tmp_path) as watch:
                if is_wrong:
                    trigger.touch()
                watch.begin()
                for number in range(PROMPTS):
                    server.complete(prompt("incident", number), 2)
                if is_wrong:
                    watch.sees(CORRUPT)
                else:
                    assert "wrong bytes" not in watch.log()
