"""The answers that all servers must give: those of an engine without any connector."""

import pytest

from tests.engine.serving import ServedEngine, ask_all
from tests.gpu_path.servers.served import ARGS, PROMPTS, Answers


@pytest.fixture(scope="session")
def expected(served_engine: ServedEngine) -> Answers:
    """Answers by prompt, on the V1 runner, with synchronous scheduling."""
    with served_engine(None, *ARGS) as server:
        return ask_all(server, PROMPTS)
