"""The command ``hpcsgd``, as ``python -m hpcsgd``."""

from __future__ import annotations

from hpcsgd.cli import main

main()
