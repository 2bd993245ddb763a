"""Compare the items in a script's checkpoint with the arguments of `load`, and read the items."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcsgd.checkpoint import items, tree
from hpcsgd.checkpoint.folder import Saved
from hpcsgd.checkpoint.snapshot import FIRST, FURTHER, Place, all_places, opened
from hpcsgd.core.topology import Topology
from hpcsgd.errors import UserError, count_text, near_miss

log = logging.getLogger(__name__)

ITEMS, GIVEN = "items", "given by name"
"""Keys of a rank's file: facts about the script's items, and the items that this rank saves."""


@dataclass(frozen=True)
class Given:
    """The arguments of a call of `save` or `load`, except the folder."""

    optimizers: int
    """Number of optimizers."""
    kinds: Mapping[str, str]
    """Kinds of the items, by name."""
    classes: Mapping[str, Sequence[str]]
    """Classes of the items that are not values; see `items.classes_of`."""


def wanted(saved: Saved, given: Given, state: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the items that `load` has to read from the checkpoint `saved`: their kinds by their names.

    Raises:
        UserError: If the saved items or optimizers differ from those that are given.
    """
    with opened(saved, [FIRST]) as (file,):
        found = tree.items(file)
        if ITEMS not in found:
            raise UserError(
                f"{saved.path} was saved by `hpcsgd train`: continue with `hpcsgd train --resume`"
            )
        reported = tree.read_item(found[ITEMS])
        there = reported["kinds"]
        if given.optimizers != (saved_ones := 1 + len(tree.items(found[FURTHER]))):
            count = count_text(saved_ones, "optimizer")
            raise UserError(f"{saved.path}: {count}, and load() was given {given.optimizers}")
    for name, kind in given.kinds.items():
        if name not in there:
            raise UserError(f"{saved.path}: nothing was saved as {name}: {near_miss(name, there)}")
        if state[name] is not None and there[name] != kind:
            raise UserError(f"{saved.path}: {name} was {there[name]}, and load() was given {kind}")
        if state[name] is not None and name in reported["classes"]:
            before, now = reported["classes"][name][0], given.classes[name]
            if before not in now:
                raise UserError(
                    f"{saved.path}: {name} was a {before}, and load() was given another class, {now[0]}"
                )
    for name, kind in there.items():
        if name not in given.kinds and kind != items.VALUE:
            raise UserError(
                f"{saved.path}: {name} was saved, and load() was not given it: give {name}=, or {name}=None "
                "to go on without what it was"
            )
    return {
        name: there[name] for name in given.kinds if state[name] is not None or there[name] == items.VALUE
    }


def states(saved: Saved, topology: Topology, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Return the saved states, by name, of the `wanted` items with which this rank continues.

    If P × K has changed, random generators are left out, and so are values that differed between ranks. An
    object whose state differed gets the mean over all ranks that saved it.
    """
    same = (topology.num_groups, topology.group_size) == (saved.P, saved.K)
    with opened(saved, [FIRST]) as (file,):
        differing = tree.read_item(tree.items(tree.items(file)[ITEMS])["differing"])
    read = _read(saved, FIRST, [name for name in wanted if name not in differing])
    own = [name for name in wanted if name in differing]
    if same:
        return read | _read(saved, (topology.group_index, topology.shard_index), own)
    for name in own:
        if wanted[name] == items.STATE:
            read[name] = _mean(saved, name)
        elif wanted[name] == items.VALUE and topology.rank == 0:
            log.warning(
                "on %d × %d ranks this starts anew: %s", topology.num_groups, topology.group_size, name
            )
    return {name: value for name, value in read.items() if wanted[name] != items.GENERATOR}


def _mean(saved: Saved, name: str) -> Any:
    mean = items.Mean(name)
    for place in all_places(saved):
        mean.add(_read(saved, place, [name])[name])
    return mean.result()


def _read(saved: Saved, place: Place, names: Iterable[str]) -> dict[str, Any]:
    with opened(saved, [place]) as (file,):
        states = tree.items(tree.items(file)[GIVEN])
        return {name: tree.read_item(states[name]) for name in names}
