"""Job files for language, ratings, image files and image pairs, each with a small dataset file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Generator, nn

from data.originals import ratings, write_movielens, write_wikitext
from data.pictures import write_classes, write_pngs
from hpcsgd.data import convert, convert_images, convert_pairs
from hpcsgd.models import cnn, edsr, lstm, ncf

USERS, ITEMS = 40, 120
WORDS = """
data = { path = "store.h5", group_batch_size = 16, arguments = { bptt = 7 } }
model = { name = "lstm", arguments = { types = 14, embedding = 8, hidden = 8, dropout = 0.2 } }
optimizer = { name = "Adam", lr = 0.02 }
lr_schedule = { scaling = "none" }
method = { name = "hierarchical", sync_every = 2 }
training = { epochs = 2, log_every = 1 }
"""
RATINGS = """
data = { path = "store.h5", group_batch_size = 32, arguments = { negatives = 3 } }
model = { name = "ncf", arguments = { users = 40, items = 120, factors = 4, hidden = [8, 4] } }
optimizer = { name = "Adam", lr = 0.02 }
lr_schedule = { scaling = "none" }
method = { name = "hierarchical", sync_every = 2 }
training = { epochs = 2, log_every = 1 }
"""
IMAGES = """
data = { path = "store.h5", group_batch_size = 4, arguments = { size = 12 } }
model = { name = "cnn", arguments = { shape = [3, 12, 12], classes = 2, widths = [4] } }
optimizer = { name = "Adam", lr = 0.02 }
lr_schedule = { scaling = "none" }
method = { name = "hierarchical", sync_every = 2 }
training = { epochs = 2, log_every = 1 }
"""
PAIRS = """
data = { path = "store.h5", group_batch_size = 2, arguments = { patch = 6, patches = 4 } }
model = { name = "edsr", arguments = { blocks = 1, width = 8, residual = 1.0 } }
optimizer = { name = "Adam", lr = 0.01 }
lr_schedule = { scaling = "none" }
method = { name = "hierarchical", sync_every = 2 }
training = { epochs = 2, log_every = 1 }
"""


def words(folder: Path) -> Path:
    """Write a job file and a dataset file of tokens."""
    convert("wikitext", write_wikitext(folder / "words"), folder / "store.h5")
    (folder / "job.toml").write_text(WORDS)
    return folder / "job.toml"


def preferences(folder: Path) -> Path:
    """Write a job file and a dataset file of ratings."""
    convert("movielens", write_movielens(folder / "ml", ratings(USERS, ITEMS, each=18)), folder / "store.h5")
    (folder / "job.toml").write_text(RATINGS)
    return folder / "job.toml"


def pictures(folder: Path) -> Path:
    """Write a job file and a dataset file of image files."""
    convert_images(write_classes(folder / "pictures", each=12), folder / "store.h5", 12)
    (folder / "job.toml").write_text(IMAGES)
    return folder / "job.toml"


def scenes(folder: Path) -> Path:
    """Write a job file and a dataset file of image pairs."""
    sizes = {"train": [(24, 31), (27, 24), (40, 30), (28, 28), (24, 24), (30, 25)], "val": 4 * [(20, 26)]}
    convert_pairs(write_pngs(folder / "pngs", sizes), folder / "store.h5", 2)
    (folder / "job.toml").write_text(PAIRS)
    return folder / "job.toml"


WORKLOADS: dict[str, Callable[[Path], Path]] = {
    "words": words,
    "ratings": preferences,
    "images": pictures,
    "pairs": scenes,
}


def fill(model: nn.Module, seed: int) -> None:
    """Fill the parameters with values from a generator of this seed, not torch's own, which threads share."""
    generator = Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)


def language_model() -> nn.Module:
    return _filled(lstm(14, embedding=8, hidden=8))


def recommender() -> nn.Module:
    return _filled(ncf(USERS, ITEMS, factors=4, hidden=[8, 4]))


def classifier() -> nn.Module:
    return _filled(cnn((3, 12, 12), classes=2, widths=[4]))


def enlarger() -> nn.Module:
    return _filled(edsr(blocks=1, width=8))


def _filled(model: nn.Module) -> nn.Module:
    fill(model, 1)
    return model


MODELS = {"words": language_model, "ratings": recommender, "images": classifier, "pairs": enlarger}
