"""``hpcsgd export``: the averaged model of a run, in a format of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import told_in_one_line


def export(
    run: Path,
    /,
    *,
    kind: Annotated[str, Parameter(name="--format")] = "safetensors",
    to: Path | None = None,
) -> None:
    """Write the averaged model of a run in a format that others read; without MPI, in one process.

    :param run: The folder of the run: what it left at its end, or its newest checkpoint.
    :param kind: safetensors (a file), hf (a folder for from_pretrained of transformers), or dcp (one for
        torch.distributed.checkpoint).
    :param to: The file or folder to write; else model.safetensors, model-hf or model-dcp in RUN.
    """
    with told_in_one_line():
        from hpcsgd.train.export import export

        print(export(run, kind, to))
