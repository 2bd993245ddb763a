"""The export formats. Each writes its file or folder as a whole, or not at all."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcsgd.data.corpus import tokenizer_of_file
from hpcsgd.data.tokenizers import Tokenizer
from hpcsgd.errors import UserError, without_warnings
from hpcsgd.files.atomic import new_folder, replacing
from hpcsgd.models.pretrained import pretrained
from hpcsgd.models.weights import distinct, first_line, safetensors_library
from hpcsgd.report.run_folder import JOB_FILE
from hpcsgd.train.export.saved_model import SavedModel

ORIGIN = "hpcsgd.json"
"""A file in exported folders that says where the model comes from."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Format:
    """An export format. `name` is the default name of the file or folder, inside the run's folder."""

    name: str
    write: Callable[[SavedModel, Path], None]


def write_safetensors(saved: SavedModel, target: Path) -> None:
    """Write a file of the library `safetensors`. A tensor with two names is written once.

    The metadata map its second name to the first, as `save_model` of the library `safetensors` does. The
    library's `load_model` reads such files.
    """
    library = safetensors_library()
    weights, ties = distinct(saved.weights)
    plain = {name: x.contiguous() for name, x in weights.items()}
    from safetensors import SafetensorError

    try:
        with replacing(target) as part:
            library.save_file(plain, part, metadata={"format": "pt", **saved.origin, **ties})
            _readable(saved, part)
    except SafetensorError as error:
        raise UserError(f"{target}: cannot be written ({error})") from error


def write_hf(saved: SavedModel, target: Path) -> None:
    """Write a folder for `from_pretrained` of `transformers`, with the tokenizer if it has files."""
    model = pretrained(saved.model())
    if model is None:
        raise UserError(
            f"{saved.run}: [model] name = {saved.config.model.name!r} is no model of the library "
            "`transformers`: use --format safetensors or dcp"
        )
    safetensors_library()
    tokenizer = _tokenizer(saved)
    _for_writing_on(model, tokenizer)
    with new_folder(target) as part:
        model.save_pretrained(part)
        if tokenizer is not None:
            for name, text in tokenizer.pretrained_files().items():
                (part / name).write_bytes(text)
        _write_origin(saved, part)
        _readable(saved, *part.iterdir())


def write_dcp(saved: SavedModel, target: Path) -> None:
    """Write a folder for `torch.distributed.checkpoint.load`, with the names of the model's `state_dict`."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException  # not a subclass of Exception

    try:
        with new_folder(target) as part:
            with without_warnings():  # torch warns that this is a single process
                state_dict_saver.save(dict(saved.weights), checkpoint_id=part)  # pyright: ignore[reportUnknownMemberType]
            _write_origin(saved, part)
    except CheckpointException as error:
        raise UserError(f"{target}: cannot be written ({first_line(error)})") from error


FORMATS: Mapping[str, Format] = {
    "safetensors": Format("model.safetensors", write_safetensors),
    "hf": Format("model-hf", write_hf),
    "dcp": Format("model-dcp", write_dcp),
}


def _readable(saved: SavedModel, *files: Path) -> None:
    """Give `files`, which only their owner can read so far, the permissions of the run's job file."""
    for file in files:
        shutil.copymode(saved.run / JOB_FILE, file)


def _tokenizer(saved: SavedModel) -> Tokenizer | None:
    """Return the tokenizer of the data. If its files are gone, log that and return None."""
    try:
        return tokenizer_of_file(saved.config.data.path)
    except UserError as error:
        log.warning("the model is exported without a tokenizer: %s", error)
        return None


def _for_writing_on(model: Any, tokenizer: Tokenizer | None) -> None:
    """Configure the model to generate text: with a cache, and with the token that ends a text."""
    model.config.use_cache = True
    if tokenizer is not None and model.config.eos_token_id is None:
        model.config.eos_token_id = tokenizer.end
        if model.generation_config is not None:
            model.generation_config.eos_token_id = tokenizer.end


def _write_origin(saved: SavedModel, folder: Path) -> None:
    origin = saved.origin | {"torch": torch.__version__}
    (folder / ORIGIN).write_bytes((json.dumps(origin, indent=1) + "\n").encode())
