"""The answers that all servers must give: those of an engine without any connector."""

from pathlib import Path

import pytest

from tests.engine.serving import ask_all, serve
from tests.gpu_path.servers.served import ARGS, PROMPTS, Answers


@pytest.fixture(scope="session")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers by prompt, on the V1 runner, with synchronous scheduling."""
    with serve(model, tmp_path_factory.mktemp("plain"), None, *ARGS) as server:
        return ask_all(server, PROMPTS)
