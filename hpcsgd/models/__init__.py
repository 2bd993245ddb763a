"""Models to train: built-in ones by short names, models of libraries, and functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hpcsgd import named
from hpcsgd.models.alexnet import alexnet
from hpcsgd.models.cnn import cnn
from hpcsgd.models.edsr import edsr
from hpcsgd.models.gpt import gpt
from hpcsgd.models.lstm import lstm
from hpcsgd.models.mlp import mlp
from hpcsgd.models.ncf import ncf
from hpcsgd.models.of_transformers import of_transformers
from hpcsgd.models.resnet import cifar_resnet, resnet20, resnet32, resnet44, resnet56, resnet110
from hpcsgd.models.resnet18 import resnet10, resnet18
from hpcsgd.models.resnet50 import resnet50, resnet101
from hpcsgd.models.transformer import transformer
from hpcsgd.models.vgg11 import vgg11

MODELS: dict[str, Callable[..., nn.Module]] = {
    "alexnet": alexnet,
    "cifar_resnet": cifar_resnet,
    "cnn": cnn,
    "edsr": edsr,
    "gpt": gpt,
    "lstm": lstm,
    "mlp": mlp,
    "ncf": ncf,
    "resnet10": resnet10,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet50": resnet50,
    "resnet56": resnet56,
    "resnet101": resnet101,
    "resnet110": resnet110,
    "transformer": transformer,
    "vgg11": vgg11,
}

LIBRARIES: Mapping[str, Callable[[str, Mapping[str, Any]], nn.Module]] = {"transformers": of_transformers}
"""For each library, a function that makes a model from a class name of the library and arguments."""


def is_known(name: str) -> bool:
    """Return whether `name` is a built-in model or one of a library, and so not a function of the user.

    The code of such models works. If one cannot be built, its arguments are wrong.
    """
    return name in MODELS or name.partition(":")[0] in LIBRARIES


def build(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the model that `name` makes of `arguments`.

    `name` is a key of `MODELS`, "transformers:Class" or "package.module:function". Raises `UserError` for an
    unknown name, for arguments that the function does not take, and for a result that is not a module.
    """
    library, _, kind = name.partition(":")
    if library in LIBRARIES:
        return LIBRARIES[library](kind, arguments)
    return named.build("model", name, MODELS, arguments, nn.Module)


__all__ = [
    "LIBRARIES",
    "MODELS",
    "alexnet",
    "build",
    "cifar_resnet",
    "cnn",
    "edsr",
    "gpt",
    "is_known",
    "lstm",
    "mlp",
    "ncf",
    "resnet10",
    "resnet18",
    "resnet20",
    "resnet32",
    "resnet44",
    "resnet50",
    "resnet56",
    "resnet101",
    "resnet110",
    "transformer",
    "vgg11",
]
