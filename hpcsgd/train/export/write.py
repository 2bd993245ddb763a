"""The command `hpcsgd export`."""

from __future__ import annotations

from pathlib import Path

from hpcsgd.errors import UserError, count_text, near_miss
from hpcsgd.models.weights import distinct
from hpcsgd.train.export.formats import FORMATS
from hpcsgd.train.export.saved_model import saved_by


def export(run: Path, kind: str = "safetensors", to: Path | None = None) -> str:
    """Write the averaged model of the run in the folder `run`, and return a line about it.

    `kind` is the format. `to` is the file or folder, which must not exist. Raises `UserError` if there is no
    model yet, or the format cannot hold it.
    """
    if kind not in FORMATS:
        raise UserError(f"no format {kind!r}; {near_miss(kind, FORMATS)}")
    target = run / FORMATS[kind].name if to is None else to
    _require_place(target)
    saved = saved_by(run)
    count = sum(x.numel() for x in distinct(saved.weights)[0].values())
    try:
        FORMATS[kind].write(saved, target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from error
    step = "" if saved.step is None else f" after step {saved.step:,}"
    tensors, numbers = count_text(len(saved.weights), "tensor"), count_text(count, "number")
    return f"{target}: {tensors}, {numbers}, from {saved.source}{step}"


def _require_place(target: Path) -> None:
    if target.exists():
        raise UserError(f"{target}: there already: remove it, or name another place by --to")
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}")
