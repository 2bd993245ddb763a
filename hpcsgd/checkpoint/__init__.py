"""Checkpoints, from which a run continues bit for bit on the same ranks, or on other numbers of ranks."""

from hpcsgd.checkpoint.folder import Checkpoints, Saved
from hpcsgd.checkpoint.snapshot import capture, restore, restore_model, restore_newest
from hpcsgd.checkpoint.writer import Writer

__all__ = ["Checkpoints", "Saved", "Writer", "capture", "restore", "restore_model", "restore_newest"]
