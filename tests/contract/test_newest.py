"""The gate: the newest vLLM on the package index is one that is tested, or this fails with a list of its news."""

from collections import defaultdict
from pathlib import Path

import pytest

from . import hosts, newest

pytestmark = [pytest.mark.contract, pytest.mark.timeout(900)]


def test_the_newest_vllm_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    if (version := newest.newest()) not in hosts.VERSIONS:
        monkeypatch.setitem(hosts.EXTRAS, version, ())
        monkeypatch.setattr(hosts, "VERSIONS", (*hosts.VERSIONS, version))
        news = newest.new_in(hosts.prepare([version])[version] or Path())
        pytest.fail(f"add vLLM {version} to EXTRAS in {hosts.__file__}. kvobs does not know of it: {news or 'nothing'}")


def test_all_of_the_last_tested_version_is_known() -> None:
    assert newest.new_in(hosts.prepare([hosts.VERSIONS[-1]])[hosts.VERSIONS[-1]] or Path()) == []


def test_a_new_hook_a_new_field_and_a_moved_class_are_listed(tmp_path: Path) -> None:
    bodies = {
        "KVConnectorBase_V1": "def start_load_kv(self): ...\n def new_hook(self): ...\n def _private(self): ...",
        "SupportsHMA": "NEW = 1",
        "KVConnectorTransferResults": "failed_recving: set\n new_field: int = 0",
        "KVOutputAggregator": "async def news(self): ...\n 'a text'",
    }
    files = defaultdict[Path, list[str]](list)
    for file, name in newest.KNOWN:
        files[tmp_path / file] += [f"class {name}:\n {bodies[name]}"] if name in bodies else []
    for path, classes in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(classes))
    assert newest.new_in(tmp_path) == [
        "KVConnectorBase_V1.new_hook",
        "SupportsHMA.NEW",
        "KVConnectorTransferResults.new_field",
        "KVOutputAggregator.news",
        "KVConnectorOutput is not in vllm/v1/outputs.py",
    ]
