"""A whole training run from a job file."""

from __future__ import annotations

from hpcsgd.train.run import run

__all__ = ["run"]
