"""Rules of connector classes: what is known of a class by its name, and of those that inherit from it."""

from types import SimpleNamespace

from kvobs.connectors.specs import load_ends_save
from kvobs.testing import Script


def test_whose_load_ends_its_promised_save_is_known_by_class_also_within_a_router_of_vllm() -> None:
    flexkv = type("Mine", (type("FlexKVConnectorV1", (), {}),), {})()
    other = Script("other")
    assert load_ends_save(flexkv)
    assert load_ends_save(SimpleNamespace(_connectors=[other, flexkv]))
    assert not load_ends_save(SimpleNamespace(_connectors=[other]))
    assert not load_ends_save(other)
