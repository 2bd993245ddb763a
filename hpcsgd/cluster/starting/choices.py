"""The data, models and methods that `hpcsgd init` offers, with values to start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """The values that job files for data of one form, such as images or tokens, have in common."""

    models: Mapping[str, tuple[str, ...]]
    """The models for data of this form, each with the names of its arguments, which are sizes of the data."""
    optimizer: Values
    schedule: Values
    arguments: Values = field(default_factory=dict[str, Any])
    """The values of [data.arguments]."""
    unit: str = "samples"
    """The plural of the things that a batch consists of, for a comment."""


SGD = {"name": "SGD", "lr": 0.05, "arguments": {"momentum": 0.9, "weight_decay": 1e-4}}
RESNETS = ("resnet18", "resnet20", "resnet32", "resnet44", "resnet56", "resnet110")
WARMED_UP = {"scaling": "linear", "warmup_epochs": 1}
FORMS: Mapping[str, Kind] = {
    "images": Kind(
        {"cnn": ("shape", "classes"), "mlp": ("inputs", "classes")}
        | dict.fromkeys((*RESNETS, "resnet50"), ("classes", "channels")),
        SGD,
        WARMED_UP,
    ),
    "arrays": Kind({"mlp": ("inputs", "classes")}, SGD, WARMED_UP),
    "image files": Kind(
        dict.fromkeys(("resnet50", "resnet101", "resnet18", "resnet10", "alexnet", "vgg11"), ("classes",)),
        SGD,
        WARMED_UP,
    ),
    "pairs": Kind(
        {"edsr": ("scale",)},
        {"name": "Adam", "lr": 1e-4},
        {"scaling": "root", "warmup_epochs": 1},
        {"patch": 48, "patches": 20},
        "patches",
    ),
    "tokens": Kind(
        {"gpt": ("types",), "lstm": ("types",)},
        {"name": "AdamW", "lr": 1e-3},
        {"scaling": "none", "warmup_epochs": 0.1},
        {"bptt": 128},
        "windows",
    ),
    "ratings": Kind(
        {"ncf": ("users", "items")},
        {"name": "Adam", "lr": 1e-3},
        {"scaling": "none"},
        {"negatives": 4},
        "ratings",
    ),
}


@dataclass(frozen=True)
class Data:
    """A known dataset, or the contents of a dataset file."""

    form: str
    sizes: Values
    """The sizes that models need, by name, such as classes; from the dataset file if it exists."""
    convert: str | None = None
    """The command that makes the dataset file, without the file's name."""
    batch_size: int = 64
    epochs: int = 10
    transform: str | None = None
    arguments: Values = field(default_factory=dict[str, Any])
    """Values of [data.arguments] in addition to those of the form."""

    @property
    def kind(self) -> Kind:
        return FORMS[self.form]


def images(channels: int, height: int, width: int, classes: int) -> dict[str, Any]:
    """Return the settings of a model for images of this shape, such as `channels` and `classes`."""
    inputs = channels * height * width
    return {
        "shape": [channels, height, width], "inputs": inputs, "channels": channels, "classes": classes
    }  # fmt: skip


def arrays(shape: Sequence[int], classes: int) -> dict[str, Any]:
    """Return the settings of a model for samples that are arrays of this shape, such as `inputs`."""
    shaped = {"shape": list(shape)} if len(shape) > 1 else {}
    return {**shaped, "inputs": prod(shape), "classes": classes}


COLLECTIONS: Mapping[str, Data] = {
    "digits": Data("images", images(1, 8, 8, 10), "digits", batch_size=32, epochs=12),
    "mnist": Data("images", images(1, 28, 28, 10), "mnist FOLDER", epochs=5),
    "cifar10": Data(
        "images", images(3, 32, 32, 10), "cifar10 cifar-10-binary.tar.gz", 128, 100, "crop_and_flip"
    ),
    "cifar100": Data(
        "images", images(3, 32, 32, 100), "cifar100 cifar-100-binary.tar.gz", 128, 100, "crop_and_flip"
    ),
    "wikitext": Data("tokens", {"types": 33278}, "wikitext wikitext-2", 32, 6),
    "text": Data(
        "tokens", {"types": 256}, "text FILES", 16, 1, arguments={"tokenizer": "bytes"}
    ),
    "movielens": Data("ratings", {"users": 943, "items": 1682}, "movielens ml-100k", 256, 20),
}  # fmt: skip
AFTER_DATASET_FILE = {"text": " --tokenizer bytes"}
"""The words after the file's name in the command that makes the dataset file, by the name of the data."""

METHODS: Mapping[str, tuple[Values, str]] = {
    "bsp": ({}, "gradients are averaged over all ranks in every step"),
    "hierarchical": ({"sync_every": 8}, "groups average their models every so many steps"),
    "diloco": ({"sync_every": 16}, "as hierarchical, with an outer optimizer"),
    "selsync": ({"delta": 0.3}, "groups average models after steps in which a gradient changed by delta"),
    "sgp": ({}, "each group sends its model to another one after every step"),
}
"""The methods by name, with their arguments and a description."""


OPENED_WITH: Mapping[str, Values] = {"pairs": {"patch": 1}}
"""For some forms of data: arguments with which any dataset file of the form can be opened."""


def data_of_file(path: Path) -> Data:
    """Return the data in a dataset file. Raises `UserError` if it cannot be opened."""
    from hpcsgd.data.layout import form_of
    from hpcsgd.data.open_split import open_split  # imports torch

    form = form_of(path)
    found: Any = open_split(path, "train", OPENED_WITH.get(form))
    sizes = {
        "images": lambda: images(*found.shape, classes=len(found.classes)),
        "arrays": lambda: arrays(found.shape, len(found.classes)),
        "image files": lambda: {"classes": len(found.classes)},
        "pairs": lambda: {"scale": found.scale},
        "tokens": lambda: {"types": found.types},
        "ratings": lambda: {"users": found.users, "items": found.items},
    }
    return Data(form, sizes[form]())
