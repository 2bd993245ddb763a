"""The text of a first job file, with comments for the user."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from hpcsgd.cluster.starting.choices import AFTER_DATASET_FILE, COLLECTIONS, METHODS, Data, data_of_file
from hpcsgd.errors import UserError, count_text, near_miss


@dataclass(frozen=True)
class Request:
    """The user's choices for a first job file."""

    data: str
    """The name of a known dataset, or the path of a dataset file."""
    model: str
    ranks: int
    groups: int
    method: str
    data_file: Path
    epochs: int | None = None


def data_named(name: str, data_file: Path | None = None) -> Data:
    """Return the data called `name`, with the sizes in its dataset file if that exists.

    Raises `UserError` if there are no such data.
    """
    if name.endswith(".h5"):
        return data_of_file(Path(name))
    if name not in COLLECTIONS:
        raise UserError(f"--data {name}: {near_miss(name, COLLECTIONS)}, or an .h5 dataset file")
    data, path = COLLECTIONS[name], data_file or Path(f"{name}.h5")
    return replace(data, sizes=data_of_file(path).sizes) if path.exists() else data


def require_model(name: str, data: Data) -> None:
    """Raise `UserError` if `name` is neither a model for these data nor a user's function."""
    if name not in data.kind.models and ":" not in name:
        raise UserError(
            f"--model {name}: {near_miss(name, data.kind.models)}, or your own package.module:function"
        )


def require_method(name: str) -> None:
    """Raise `UserError` if there is no such method."""
    if name not in METHODS:
        raise UserError(f"--method {name}: {near_miss(name, METHODS)}")


def require_positive(name: str, value: int) -> None:
    """Raise `UserError` if `value`, which the flag `name` has, is less than 1."""
    if value < 1:
        raise UserError(f"--{name} {value}: at least 1 is needed")


def require_groups(groups: int, ranks: int) -> None:
    """Raise `UserError` if `ranks` cannot form so many groups."""
    require_positive("groups", groups)
    if ranks % groups:
        fitting = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise UserError(f"--groups {groups}: does not divide {count_text(ranks, 'rank')}; allowed: {fitting}")


def job_text(wanted: Request, data: Data, file: Path) -> str:
    """Return the text of the job file that will be written to `file`."""
    return "\n".join(_lines(wanted, data, file)) + "\n"


def commands(wanted: Request, data: Data, file: Path) -> list[str]:
    """Return the commands to run next: to make the dataset file, and to train."""
    end = AFTER_DATASET_FILE.get(wanted.data, "")
    make = [f"hpcsgd data convert {data.convert} {wanted.data_file}{end}"] if data.convert else []
    start = f"mpiexec -n {wanted.ranks} " if wanted.ranks > 1 else ""
    return [*([] if wanted.data_file.exists() else make), f"{start}hpcsgd train {file}"]


def _lines(wanted: Request, data: Data, file: Path) -> Iterator[str]:
    P, K = wanted.groups, wanted.ranks // wanted.groups
    kind = data.kind
    batch = -(-data.batch_size // K) * K
    arguments, does = METHODS[wanted.method]
    yield f"# {wanted.model} on {wanted.data}: {count_text(P, 'group')} of {count_text(K, 'rank')}."
    for command in commands(wanted, data, file):
        yield f"#   {command}"
    yield "# Every key can be another for one run: hpcsgd train FILE --training.epochs 3"
    yield from ("seed = 1", "")
    yield from (
        "[parallel]",
        f"groups = {P} # divides the number of ranks; the ranks of one share each batch",
        "",
    )
    data_file = os.path.relpath(wanted.data_file, file.parent)
    yield from ("[data]", f"{_pair('path', data_file)} # as seen from this file")
    yield f"group_batch_size = {batch} # {kind.unit} of a group and step: {batch // K} on each rank"
    if data.transform is not None:
        yield f"{_pair('transform', data.transform)} # of each training sample"
    own = {**kind.arguments, **data.arguments}
    if own:
        yield from ("", "[data.arguments]", *_pairs(own))
    yield from ("", "[model]", f'{_pair("name", wanted.model)} # or your own: "package.module:function"')
    yield from ("", "[model.arguments]", *_arguments(wanted.model, data))
    optimizer = dict(kind.optimizer)
    more = optimizer.pop("arguments", {})
    yield from ("", "[optimizer]", f"{_pair('name', optimizer['name'])} # of torch.optim, or your own")
    yield f"{_pair('lr', optimizer['lr'])} # of one group"
    if more:
        yield from ("", "[optimizer.arguments]", *_pairs(more))
    yield from ("", "[lr_schedule]", f"{_pair('scaling', kind.schedule['scaling'])} # of lr with the groups")
    yield from _pairs({name: value for name, value in kind.schedule.items() if name != "scaling"})
    yield from ('name = "CosineAnnealingLR" # of torch.optim.lr_scheduler, or your own',)
    yield from ('arguments = { T_max = "length" } # of the run, in steps', 'interval = "step"')
    yield from ("", "[method]", f"{_pair('name', wanted.method)} # {does}", *_pairs(arguments))
    yield from ("", "[training]", f"epochs = {wanted.epochs or data.epochs}")
    yield "log_every = 20 # steps"
    yield "# checkpoint_every_steps = 500 # steps; otherwise at the end of every epoch"
    yield "# time_limit_s = 3600 # seconds; saves, stops, and --resume goes on"
    yield from ("", "[run]", _pair("output_dir", f"runs/{file.stem}"))
    yield '# loggers = ["tensorboard"] # or wandb, mlflow: get the metrics, too'


def _arguments(model: str, data: Data) -> Iterator[str]:
    """Yield the lines of a model's arguments; for the user's own model, the data's sizes as comments."""
    if model in data.kind.models:
        yield from (_pair(name, data.sizes[name]) for name in data.kind.models[model])
        return
    yield "# of your function, by name; the samples have:"
    yield from (f"# {_pair(name, size)}" for name, size in data.sizes.items())


def _pairs(values: Mapping[str, Any]) -> Iterator[str]:
    return (_pair(name, value) for name, value in values.items())


def _pair(name: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{name} = {value}"
    return tomli_w.dumps({name: value}).rstrip("\n")
