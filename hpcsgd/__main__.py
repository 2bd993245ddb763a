"""``python -m hpcsgd`` is the command ``hpcsgd``."""

from __future__ import annotations

from hpcsgd.cli import main

main()
