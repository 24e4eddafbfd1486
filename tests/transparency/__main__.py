"""Compare kvobs with vLLM's own MultiConnector in many random lives of an engine, with the vLLM on the path, as JSON::

python -m tests.transparency --lives 5000
python -m tests.transparency --first 4711 --lives 1
"""

import argparse
import json
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lives", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first life's seed")
    arguments = parser.parse_args()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM prints, too, and from its import on
    from vllm import __version__

    from tests.transparency.sweep import sweep

    findings = sweep(range(arguments.first, arguments.first + arguments.lives))
    with out:
        json.dump({"vllm": __version__, **vars(findings)}, out, indent=1)
    sys.exit(findings.faulty > 0)


if __name__ == "__main__":
    main()
