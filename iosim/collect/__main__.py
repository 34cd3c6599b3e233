"""`python -m iosim.collect FILE.jsonl [FAMILY …]`: for a host with NumPy, PyTorch and Triton alone.

The same as `iosim collect`, without the packages that the command line needs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from iosim.collect.run import collect
from iosim.errors import IosimError


def main() -> int:
    """Exit code 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="iosim.collect", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--repeat", type=int, default=3, help="launches of each case (3)")
    parser.add_argument("family", nargs="*", help="families of probes (all)")
    asked = parser.parse_intermixed_args()
    try:
        rows = collect(asked.output, asked.family, asked.repeat, _say)
    except IosimError as error:
        _say(str(error))
        return 2
    _say(f"wrote {rows} rows to {asked.output}")
    return 0


def _say(line: str) -> None:
    sys.stderr.write(f"iosim: {line}\n")


if __name__ == "__main__":
    raise SystemExit(main())
