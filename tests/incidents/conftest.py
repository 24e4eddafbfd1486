"""The model of the incidents' servers; and they are first, since their few modules take the longest."""

import pytest

from tests.engine.conftest import model

__all__ = ["model"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith("tests/incidents/"))
