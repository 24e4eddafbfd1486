"""A run of requests on a real server: `kvobs summary` counts what the clients and vLLM itself have counted."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvobs.demo.run import files, host_memory, multi_connector
from kvobs.export.numbers import PROMPT_TOKENS
from kvobs.testing.server import Server
from tests.engine.serving import TOKENS, ServedEngine, prompt, total

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KVOBS = Path(sys.executable).parent / "kvobs"
COUNTED = {
    "hits": ("kvobs_lookups_total", {"outcome": "hit"}),
    "offered_tokens": ("kvobs_offered_tokens_total", {}),
    "loads": ("kvobs_loads_total", {"outcome": "ok"}),
    "loaded_tokens": ("kvobs_load_tokens_total", {}),
    "loaded_bytes": ("kvobs_load_bytes_total", {}),
}
SOURCES = {"computed": "local_compute", "local_cache": "local_cache_hit", "loaded": "external_kv_transfer"}
CLIENT = """
import json, sys, urllib.request
url, *prompts = sys.argv[1:]
def post(path, **body):
    data = json.dumps(body).encode()
    urllib.request.urlopen(urllib.request.Request(url + path, data, {"content-type": "application/json"})).read()
for text in prompts:
    post("/v1/completions", model="tiny", prompt=text, max_tokens=8, temperature=0)
    post("/reset_prefix_cache")
print("a benchmark")
raise SystemExit(3)
"""


def counted(server: Server) -> dict[str, dict[str, float]]:
    """Return what is at /metrics, by connector and by source."""
    found = {
        name: {field: total(server, metric, connector=name, **labels) for field, (metric, labels) in COUNTED.items()}
        for name in ("cpu", "disk")
    }
    return found | {"": {words: total(server, PROMPT_TOKENS, source=source) for words, source in SOURCES.items()}}


def test_a_summary_counts_what_was_asked_while_its_command_ran(served_engine: ServedEngine, tmp_path: Path) -> None:
    config, saved = multi_connector(host_memory(), files(tmp_path / "disk")), tmp_path / "a.json"
    prompts = [prompt("summary", i) for i in range(6)]
    # Its command line has the port, by which vLLM's own metrics are found.
    with served_engine(config, is_spawned=True) as server:
        for text in prompts:
            server.complete(text, TOKENS)
        server.reset_prefix_cache()
        before = counted(server)
        client = [sys.executable, "-c", CLIENT, server.url, *prompts]
        command = [str(KVOBS), "summary", "--json", "-o", str(saved), "--", *client]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        after = counted(server)
        compare = [str(KVOBS), "summary", "--since-start", "--compare", str(saved)]
        comparison = subprocess.run(compare, capture_output=True, text=True, timeout=60, check=False)
    assert comparison.returncode == 0, comparison.stderr
    compared = comparison.stdout
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "a benchmark\n", "")
    (found,) = [one for one in json.loads(saved.read_text())["servers"] if one["server"].endswith(str(server.port))]
    grown = {owner: {key: n - before[owner][key] for key, n in numbers.items()} for owner, numbers in after.items()}
    rows: dict[str, dict[str, Any]] = {row["connector"]: row for row in found["connectors"]}
    for name in ("cpu", "disk"):
        assert {key: rows[name][key] for key in COUNTED} == grown[name]
        assert rows[name]["lookups"] == len(prompts)
    assert rows["cpu"]["loads"] == len(prompts), "each was computed before"
    assert rows["cpu"]["loaded_tokens"] > 0
    tokens = found["prompt_tokens"]
    assert sum(tokens["loaded"].values()) == grown[""]["loaded"] == sum(row["loaded_tokens"] for row in rows.values())
    assert (tokens["computed"], tokens["local_cache"]) == (grown[""]["computed"], grown[""]["local_cache"])
    assert 0 < rows["cpu"]["load_p50_s"] <= rows["cpu"]["load_p99_s"]
    whole = compared.partition(found["server"])[2].partition("all prompts")[0].partition("disk")[0]
    assert re.search(rf"^  loads +{len(prompts)} +{after['cpu']['loads']:.0f} ", whole, re.MULTILINE), compared
