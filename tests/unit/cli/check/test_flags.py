"""What vLLM's options mean is what vLLM makes of them."""

from unittest.mock import Mock

import pytest
from vllm.entrypoints.cli import serve
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvobs.cli.check.flags import api_servers, flags_of
from kvobs.cli.check.source import read


@pytest.mark.parametrize("line", [
    "", "-dp 4", "-dp 4 -dph -dpl 2", "-dp 4 -dpr 2 -dpl 2", "-dp 4 -dpr 2", "-dp 4 -dph -dpl 0", "-dp 4 -dpe",
    "-dp 4 -dpn 0", "-dp 4 -dpm", "-dp 4 --enable-elastic-ep",
])  # fmt: skip
def test_there_are_as_many_api_servers_as_vllm_starts(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for starts in ("run_dp_supervisor", "run_headless", "run_multi_api_server", "run_server", "uvloop"):
        monkeypatch.setattr(serve, starts, Mock())
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(["m", *line.split()])
    serve.ServeSubcommand.cmd(given)
    (source,) = read(f"vllm serve m {line} --kv-transfer-config {{}}")
    assert api_servers(source.flags) == (given.api_server_count or 1)


def test_ports_end_where_there_are_no_more() -> None:
    """A slip in the number of engines takes no memory."""
    flags = flags_of({"kv_connector": "NixlConnector"}, {"data-parallel-size": str(10**12)}, {}, given={}, taken={})
    assert flags.nixl == range(5600, 65536)


def test_an_offloading_size_that_is_infinite_in_bytes_is_refused() -> None:
    (source,) = read("vllm serve m --kv-offloading-size 1e308")
    assert "is not a number of GiB above 0" in str(source.findings[0])
