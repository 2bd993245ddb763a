"""A machine file of these ranks, as ``hpcsgd measure`` writes it."""

from __future__ import annotations

import argparse
from pathlib import Path

from hpcsgd.performance.measuring import run

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    given = parser.parse_args()
    run(None, None, out=given.out, quick=False, max_bytes=given.max_bytes, seconds=given.seconds)
