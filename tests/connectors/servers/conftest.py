"""What the tests with real stores share: the answers of an engine without any connector."""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.connectors.servers.traffic import LONG, PROMPTS, SMALL_CACHE, Answers, ask_all
from tests.engine.serving import ServedEngine

pytest.register_assert_rewrite("tests.connectors.servers.stores")


class ByEngine(LoadScopeScheduling):
    """Gives one worker of pytest all tests that share an engine: those of a file with the same parameter."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        return file + test[test.index("[") :] if "[" in test else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Not by marks with ``--dist loadgroup``, which pytest-xdist 3.8 does not see under pytest 9.2."""
    return ByEngine(config, log)


@pytest.fixture(scope="session")
def expected(served_engine: ServedEngine) -> Answers:
    """Answers by prompt, without a connector."""
    with served_engine(None, *SMALL_CACHE) as server:
        answers = ask_all(server, [*PROMPTS, *LONG])
        assert [one.error for one in answers if one.error] == []
        assert [one.tokens for one in ask_all(server, [*PROMPTS, *LONG])] == [one.tokens for one in answers]
    return {one.prompt: one.tokens for one in answers}
