"""``hpcsgd export``: the averaged model of a run, in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from hpcsgd.cli.user_errors import errors_in_one_line


def export(
    run: Path,
    /,
    *,
    kind: Annotated[str, Parameter(name="--format")] = "safetensors",
    to: Path | None = None,
) -> None:
    """Write the averaged model of a run in a format of other programs; without MPI, in one process.

    :param run: The folder of the run, with its final model or its newest checkpoint.
    :param kind: safetensors (a file), hf (a folder for from_pretrained of transformers), or dcp (a folder for
        torch.distributed.checkpoint).
    :param to: The file or folder to write; default: model.safetensors, model-hf or model-dcp in RUN.
    """
    with errors_in_one_line():
        from hpcsgd.train.export import export

        print(export(run, kind, to))
