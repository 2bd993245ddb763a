"""Weights from files: those that fit are loaded bit for bit, and others are refused in one line."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from hpcsgd.errors import UserError
from hpcsgd.models import gpt, mlp
from hpcsgd.models.metadata import IndexUnpickler
from hpcsgd.models.weights import load_into, read


def net(seed: int, **changed: Any) -> nn.Module:
    torch.manual_seed(seed)
    return gpt(**{"types": 20, "width": 8, "layers": 1, "heads": 2, **changed})


def pickled(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "model.pt")
    return folder / "model.pt"


def by_the_library(model: nn.Module, folder: Path) -> Path:
    save_model(model, str(folder / "a.safetensors"))
    return folder / "a.safetensors"


def in_parts(model: nn.Module, folder: Path) -> Path:
    """Write the model as `save_pretrained` writes a large one: in parts, with an index."""
    state = {n: x for n, x in model.state_dict().items() if n != "scores.weight"}
    names = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(state)}
    for part in set(names.values()):
        save_file({n: x for n, x in state.items() if names[n] == part}, folder / part)
    listed = ", ".join(f'"{n}": "{part}"' for n, part in names.items())
    (folder / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{listed}}}}}')
    return folder


def run_folder(model: nn.Module, folder: Path) -> Path:
    pickled(model, folder)
    return folder


@pytest.mark.parametrize("write", [pickled, by_the_library, in_parts, run_folder])
def test_what_was_written_comes_in(tmp_path: Path, write: Callable[[nn.Module, Path], Path]) -> None:
    theirs, ours = net(1), net(2)
    load_into(ours, write(theirs, tmp_path))
    for name, x in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], x)


def test_other_dtypes_come_in_by_value(tmp_path: Path) -> None:
    theirs, ours = net(1).bfloat16(), net(2)
    load_into(ours, pickled(theirs, tmp_path))
    found, expected = ours.state_dict()["norm.weight"], theirs.state_dict()["norm.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())


def refusal(model: nn.Module, path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_into(model, path)
    return str(caught.value)


def test_what_does_not_fit(tmp_path: Path) -> None:
    path = pickled(net(1), tmp_path)
    assert refusal(net(1, types=21), path) == (
        f"{path}: embedding.weight is of shape [20, 8], in this model [21, 8]"
    )
    assert refusal(mlp(36, [8]), path).startswith(f"{path}: lacks ")
    state = net(1).state_dict()
    state["nrm.weight"] = state.pop("norm.weight")
    torch.save(state, path)
    assert refusal(net(1), path) == (
        f"{path}: lacks norm.weight and has nrm.weight, which this model has not; nrm.weight: did you mean "
        "'norm.weight'?"
    )
    before = net(2)
    assert torch.equal(before.state_dict()["norm.weight"], net(2).state_dict()["norm.weight"])
    torch.save(net(1, layers=3).state_dict(), path)
    assert refusal(net(1), path) == (
        f"{path}: has blocks.1.attention.out.weight, blocks.1.attention.qkv.weight, "
        "blocks.1.before_attention.weight and 9 more, which this model has not"
    )
    torch.save({n: x.clone() + (n == "scores.weight") for n, x in net(1).state_dict().items()}, path)
    assert refusal(net(1), path) == (
        f"{path}: scores.weight and embedding.weight differ; this model has one tensor for both"
    )


def test_what_holds_no_weights(tmp_path: Path) -> None:
    path, folder = tmp_path / "x", tmp_path / "folder"
    folder.mkdir()
    assert refusal(net(1), path) == f"{path}: no such file"
    assert refusal(net(1), folder).startswith(f"{folder}: a folder without model.safetensors or model.pt, ")
    path.write_bytes(b"no pickle")
    assert refusal(net(1), path).startswith(f"{path}: not a state_dict of tensors alone, or damaged (")
    torch.save(net(1), path)
    assert refusal(net(1), path).startswith(f"{path}: not a state_dict of tensors alone, or damaged (")
    torch.save({"model": {}}, path)
    assert refusal(net(1), path) == f"{path}: holds a dict, expected a state_dict: tensors by name"
    whole = by_the_library(net(1), tmp_path).read_bytes()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(whole[:-1])
    assert refusal(net(1), cut).startswith(f"{cut}: not a safetensors file, or damaged (")
    for index in ("{", "[]", '{"metadata": {}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        assert refusal(net(1), folder).startswith(f"{folder}/model.safetensors.index.json: no index of ")
    (folder / "model.safetensors.index.json").unlink()
    (folder / ".metadata").write_bytes(b"x")
    assert refusal(net(1), folder).startswith(f"{folder}: a damaged checkpoint (")


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
            return Path.touch, (tmp_path / "ran",)  # pyright: ignore[reportReturnType]

    torch.save({"x": Bad()}, tmp_path / "bad.pt")
    with pytest.raises(UserError):
        read(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


class Mischief:
    """An object whose pickle calls a function when it is loaded. Here the function creates a file."""

    def __init__(self, left: Path) -> None:
        self.left = left

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.left,)


def test_an_index_from_elsewhere_runs_no_code(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    folder, left = tmp_path / "checkpoint", tmp_path / "left"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that this is one process
        save({**net(0).state_dict(), "half": torch.ones(2, dtype=torch.bfloat16)}, checkpoint_id=folder)
    given = read(folder)
    assert torch.equal(given["half"], torch.ones(2, dtype=torch.bfloat16))

    (folder / ".metadata").write_bytes(pickle.dumps(Mischief(left)))
    with pytest.raises(UserError, match=r"asks for pathlib\.Path\.touch, which no checkpoint needs"):
        read(folder)
    assert not left.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert left.exists(), "the mischief is one"


class Named:
    """An attribute, pickled as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, of: Any, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


def test_members_of_enumerations_are_plain_in_every_version_of_python() -> None:
    index = pickle.dumps(Named(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST"))
    assert IndexUnpickler(io.BytesIO(index)).load() is _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST


@pytest.mark.parametrize(("of", "name"), [(Path, "touch"), (_MEM_FORMAT_ENCODING, "mro"), ((), "count")])
def test_other_attributes_are_not_looked_up(of: Any, name: str) -> None:
    index = pickle.dumps(Named(of, name))
    with pytest.raises(pickle.UnpicklingError, match=r"asks for builtins\.getattr, which"):
        IndexUnpickler(io.BytesIO(index)).load()
