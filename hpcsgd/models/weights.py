"""Loading of weights into a model, from files of an export, of a run or of another program.

=====================  ===================================================================================
path                   what is read
=====================  ===================================================================================
a file of safetensors  all its tensors, by the library `safetensors`
another file           a state_dict that `torch.save` wrote, such as `model.pt` of a run; nothing but tensors
                       is unpickled
a folder               `model.safetensors`, whole or in parts, as `save_pretrained` of the library
                       `transformers` writes it; otherwise a checkpoint of `torch.distributed.checkpoint`;
                       otherwise `model.pt`, as in the folder of a run
=====================  ===================================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpcsgd.core.fsdp import all_gathered, is_fsdp
from hpcsgd.errors import UserError, near_miss, without_warnings
from hpcsgd.models.metadata import require_plain
from hpcsgd.models.pretrained import pretrained

Weights = dict[str, Tensor]
INDEX = "model.safetensors.index.json"
SHOWN = 3
"""Maximum number of names that an error line lists; it also says how many more there are."""


def load_into(model: nn.Module, path: Path) -> None:
    """Load the weights at `path`, of any dtype, into `model`.

    All names and shapes have to fit. A tensor with several names in the model (tied weights) may be stored
    under one of them. Raises `UserError` if there is nothing to read, or the weights are of another model.
    """
    given = read(path)
    target = max(_targets(model), key=lambda each: len(each.state_dict().keys() & given.keys()))
    own = target.state_dict()
    given |= {twin: given[name] for twin, name in twins(own, given).items()}
    _require_fit(path, own, given)
    _require_tied(path, own, given)
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(given[name])


def read(path: Path) -> Weights:
    """Return the weights at `path` by name, in host memory. Raises `UserError` if they cannot be read."""
    try:
        if path.is_dir():
            return _read_folder(path)
        return _read_safetensors(path) if _is_safetensors(path) else _read_pickled(path)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename or path}: no such file") from error
    except (OSError, EOFError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error


def twins(own: Mapping[str, Tensor], there: Iterable[str]) -> dict[str, str]:
    """Return, for names in `own` that are not in `there`, another name of the same tensor in `there`.

    Names whose tensor has no name in `there` are left out.
    """
    known = set(there)
    homes = {_home(own[name]): name for name in own if name in known}
    missing = [name for name in own if name not in known]
    return {name: homes[_home(own[name])] for name in missing if _home(own[name]) in homes}


def distinct(weights: Mapping[str, Tensor]) -> tuple[Weights, dict[str, str]]:
    """Return each tensor in `weights` once, by its first name, and a map from other names to the first."""
    first: dict[Any, str] = {}
    names = {name: first.setdefault(_home(x), name) for name, x in weights.items()}
    once = {name: weights[name] for name in first.values()}
    return once, {name: kept for name, kept in names.items() if name != kept}


def whole_state(model: nn.Module, *, keeps: bool) -> Weights:
    """Return the model's state_dict on the host if this rank `keeps` it, otherwise an empty dict.

    Collective over the ranks that share the model. Tensors of an FSDP model are gathered one at a time.
    """
    own = model.state_dict(keep_vars=True)
    once, ties = distinct(own)
    found: Weights = {}
    for name, x in once.items():
        here = all_gathered(x.detach())
        if keeps:
            found[name] = here.to("cpu", copy=True)
    return {name: found[ties.get(name, name)] for name in own} if keeps else {}


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text, or the name of its class if it has no text."""
    return str(error).strip().split("\n", maxsplit=1)[0] or type(error).__name__


def safetensors_library() -> Any:
    """Return `safetensors.torch`. Raises `UserError` if the library `safetensors` is missing."""
    try:
        import safetensors.torch
    except ImportError as error:
        raise UserError('needs the library `safetensors`: pip install "hpcsgd[hf]"') from error
    return safetensors.torch


def _targets(model: nn.Module) -> list[nn.Module]:
    """Return the modules to which loaded weights may belong.

    They are the model and, if it is a wrapper around a model of the library `transformers`, that model.
    """
    inside = pretrained(model)
    return [model] if inside is None or inside is model else [model, inside]


def _home(x: Tensor) -> Any:
    if is_fsdp(x):  # a rank without rows has no storage that identifies the tensor
        return id(x)
    return (x.untyped_storage().data_ptr(), x.storage_offset(), x.size(), x.stride()) if x.numel() else id(x)


def _is_safetensors(path: Path) -> bool:
    """Return whether `path` is a safetensors file, by its suffix or its first bytes.

    Such a file begins with a length of 8 bytes and JSON.
    """
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _read_safetensors(path: Path) -> Weights:
    library = safetensors_library()
    try:
        with library.safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            twins = file.metadata() or {}
    except Exception as error:
        raise UserError(f"{path}: not a safetensors file, or damaged ({error})") from error
    return weights | {twin: weights[name] for twin, name in twins.items() if name in weights}


def _read_pickled(path: Path) -> Weights:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:
        text = f"not a state_dict of tensors alone, or damaged ({first_line(error)})"
        raise UserError(f"{path}: {text}") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{path}: holds a {type(found).__name__}, expected a state_dict: tensors by name")
    return dict(found)


def _read_folder(path: Path) -> Weights:
    if (index := path / INDEX).is_file():
        try:
            parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(f"{index}: no index of safetensors, or damaged ({error})") from error
        return {name: x for part in parts for name, x in _read_safetensors(path / part).items()}
    if (whole := path / "model.safetensors").is_file():
        return _read_safetensors(whole)
    if (path / ".metadata").is_file():
        return _read_distributed(path)
    if (left := path / "model.pt").is_file():
        return _read_pickled(left)
    raise UserError(
        f"{path}: a folder without model.safetensors or model.pt, and no checkpoint of "
        "torch.distributed.checkpoint"
    )


def _read_distributed(path: Path) -> Weights:
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.api import CheckpointException  # not a subclass of Exception
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        require_plain(path)
        saved = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {n: m for n, m in saved.items() if isinstance(m, TensorStorageMetadata)}
        weights = {n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in tensors.items()}
        with without_warnings():  # torch warns that this is a single process
            state_dict_loader.load(weights, checkpoint_id=path)
    except (Exception, CheckpointException) as error:
        raise UserError(f"{path}: a damaged checkpoint ({first_line(error)})") from error
    return weights


def _require_fit(path: Path, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing, unexpected = own.keys() - given.keys(), given.keys() - own.keys()
    if missing or unexpected:
        lacking = f"lacks {_some(missing)}" if missing else ""
        more = f"has {_some(unexpected)}, which this model has not" if unexpected else ""
        raise UserError(f"{path}: {' and '.join(filter(None, [lacking, more]))}{_hint(unexpected, missing)}")
    for name, value in own.items():
        if value.shape != given[name].shape:
            raise UserError(
                f"{path}: {name} is of shape {list(given[name].shape)}, in this model {list(value.shape)}"
            )


def _hint(unexpected: Iterable[str], missing: Iterable[str]) -> str:
    stranger = min(unexpected, default="")
    likely = near_miss(stranger, missing).partition("Allowed:")[0].strip()
    return f"; {stranger}: {likely}" if likely else ""


def _require_tied(path: Path, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    first: dict[Any, str] = {}
    for name, value in own.items():
        twin = first.setdefault(_home(value), name)
        if twin != name and not torch.equal(given[name], given[twin]):
            raise UserError(f"{path}: {name} and {twin} differ; this model has one tensor for both")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
