"""Run the demo with the vLLM of this interpreter, and say what came of it as JSON: ``serve.py FILE``."""

import json
import sys
from pathlib import Path

from rich.console import Console

from kvobs.demo.run import Demo
from kvobs.testing.server import ServerError


def main(target: Path) -> None:
    from vllm import __version__

    try:
        rows = Demo(Console(), requests=48).run().connectors
    except ServerError as error:
        sys.exit(str(error))
    connectors = {
        row.connector: {
            "hits": row.hits,
            "loads": {"ok": row.loads, "failed": row.failed_loads, "aborted": row.aborted_loads},
            "tokens": row.loaded_tokens,
        }
        for row in rows
    }
    target.write_text(json.dumps({"vllm": __version__, "connectors": connectors}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
