"""What the tests with real stores share: the model, and the answers of an engine without any connector."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvobs.demo.model import make_model
from tests.connectors.servers.traffic import PROMPTS, SMALL_CACHE, Answers, ask_all
from tests.engine.serving import serve

pytest.register_assert_rewrite("tests.connectors.servers.stores")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests that share an engine into one group: two groups run at a time."""
    for item in items:
        if isinstance(item, pytest.Function) and Path(__file__).parent in item.path.parents:
            engine = item.callspec.id if hasattr(item, "callspec") else ""
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem} {engine}"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers by prompt, without a connector."""
    with serve(model, tmp_path_factory.mktemp("plain"), None, *SMALL_CACHE) as server:
        answers = ask_all(server, PROMPTS)
        assert [one.error for one in answers if one.error] == []
        assert [one.tokens for one in ask_all(server, PROMPTS)] == [one.tokens for one in answers]
    return {one.prompt: one.tokens for one in answers}
