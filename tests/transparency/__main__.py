"""Compare kvobs with vLLM's own MultiConnector in many random lives of an engine, with the vLLM on the path::

python -m tests.transparency --lives 5000
python -m tests.transparency --first 4711 --lives 1
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.transparency.sweep import Findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first life's seed")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a text")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints, too, and from its import on
    from vllm import __version__

    from tests.transparency.sweep import sweep

    began = time.monotonic()
    findings = sweep(range(arguments.first, arguments.first + arguments.lives))
    with out:
        if arguments.json:
            json.dump({"vllm": __version__, **findings.as_json()}, out)
        else:
            out.write(_text(__version__, findings, time.monotonic() - began))
    sys.exit(findings.faulty > 0)


def _text(version: str, findings: Findings, took_s: float) -> str:
    lines = [*(f"{fault}\n" for fault in findings.faults)]
    lines.append(f"vLLM {version}: {findings.lives} lives, {findings.calls} calls compared in {took_s:.0f} s")
    lines += [f"  {count:8} {what}" for what, count in sorted(findings.seen.items())]
    lines.append("where vLLM's own class goes wrong, compared up to there:")
    lines += [f"  {count:8} {what}" for what, count in sorted(findings.stock.items())]
    lines.append(f"{findings.faulty} lives differ in what is not declared")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
