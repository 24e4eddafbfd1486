"""Rules of connector classes: what is known of a class by its name, and of those that inherit from it."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvobs.connectors.specs import StoreSizes, chunk_tokens, load_ends_save
from kvobs.probe.recorder import Recorder
from kvobs.state.cache_layout import CacheLayout
from kvobs.testing import Script
from tests.support.numbers import taken


def test_a_class_whose_load_ends_its_save_is_known_in_a_router() -> None:
    flexkv = type("Mine", (type("FlexKVConnectorV1", (), {}),), {})()
    other = Script("other")
    assert load_ends_save(flexkv)
    assert load_ends_save(SimpleNamespace(_connectors=[other, flexkv]))
    assert not load_ends_save(SimpleNamespace(_connectors=[other]))
    assert not load_ends_save(other)


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
    """Of four ranks, on which a token takes 8 bytes; not where layers keep few tokens, or a state."""
    recorder, transfer = Recorder(1), SimpleNamespace(kv_connector_extra_config=options)
    spec: Any = SimpleNamespace(index=0, connector_class=type(name, (), {}), transfer_config=transfer)
    sizes = StoreSizes(recorder, [spec], 4, copies)
    sizes.laid_out(CacheLayout((16,), (4 * 8 * 16,), is_full=False))
    assert not taken(recorder).gauges
    sizes.laid_out(CacheLayout((16,), (8 * 16,), is_full=True))
    assert sum(taken(recorder).gauges.values()) == tokens


TIERS = OF_ALL | {"secondary_tiers": [{"type": "fs"}]}


@pytest.mark.parametrize(("name", "options", "longest", "warns"), [
    ("OffloadingConnector", OF_ALL, 1000, False), ("OffloadingConnector", OF_ALL, 1001, True),
    ("OffloadingConnector", TIERS, 1001, True), ("OffloadingConnector", TIERS, 1000, False),
    ("SimpleCPUOffloadConnector", OF_EACH, 2001, True), ("SimpleCPUOffloadConnector", OF_EACH, 2000, False),
    ("SimpleCPUOffloadConnector", OF_ALL | {"disk_path": "/d"}, 1001, False),
    ("HF3FSKVConnector", {"hf3fs_file_size": 8000}, 10_000, False),
])  # fmt: skip
def test_memory_too_small_for_a_prompt_warns_with_both_numbers(
    name: str, options: Any, longest: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In the memory of a connector with tiers, too: each prompt goes through it."""
    transfer = SimpleNamespace(kv_connector_extra_config=options)
    spec: Any = SimpleNamespace(index=0, name="cpu", connector_class=type(name, (), {}), transfer_config=transfer)
    with caplog.at_level("WARNING", "vllm.kvobs"):
        StoreSizes(Recorder(1), [spec], 4, 1, longest).laid_out(CacheLayout((16,), (8 * 16,), is_full=True))
    said = [message for message in caplog.messages if f"but a prompt may have {longest:,} (max_model_len)" in message]
    assert bool(said) is warns
    assert all(f"room for {longest - 1:,} tokens" in message for message in said)


CHUNKED: list[tuple[str, dict[str, Any], dict[str, str], int | None]] = [
    ("OffloadingConnector", {}, {}, None),
    ("OffloadingConnector", {"block_size": "64"}, {}, 64),
    ("OffloadingConnector", {"blocks_per_chunk": 3}, {}, 48),
    ("OffloadingConnector", {"block_size": "many"}, {}, None),
    ("OffloadingConnector", {"blocks_per_chunk": -1}, {}, None),
    ("LMCacheConnectorV1", {}, {}, 256),
    ("LMCacheConnectorV1", {"lmcache.chunk_size": 128}, {"LMCACHE_CHUNK_SIZE": "64"}, 128),
    ("LMCacheMPConnector", {}, {"LMCACHE_CHUNK_SIZE": "64"}, 64),
    ("LMCacheMPConnector", {}, {"LMCACHE_CHUNK_SIZE": "many"}, None),
    ("LMCacheConnectorV1", {}, {"LMCACHE_CONFIG_FILE": "/etc/lmcache.yaml"}, None),
    ("NixlConnector", {"block_size": 64}, {}, None),
]


@pytest.mark.parametrize(("name", "options", "env", "tokens"), CHUNKED)
def test_a_chunk_is_known_where_it_is_stated(
    name: str, options: Any, env: dict[str, str], tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("LMCACHE_CHUNK_SIZE", "LMCACHE_CONFIG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    transfer = SimpleNamespace(kv_connector_extra_config=options)
    spec: Any = SimpleNamespace(index=1, connector_class=type(name, (), {}), transfer_config=transfer)
    assert chunk_tokens([spec], 16) == ({} if tokens is None else {1: tokens})
