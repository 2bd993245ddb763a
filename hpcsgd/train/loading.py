"""The samplers and batches of each rank, as the [data] section of a job file describes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hpcsgd.config.schema import Config, DataSection
from hpcsgd.core.topology import Topology
from hpcsgd.data import (
    PARTITIONS,
    AsRank,
    Batches,
    InjectedBatches,
    Injection,
    Overlapping,
    Partition,
    Sampler,
    Split,
    open_split,
    require_a_batch,
)
from hpcsgd.errors import UserError, count_text, in_section
from hpcsgd.named import call, call_named, resolve

log = logging.getLogger(__name__)


def opened(data: DataSection, split: str) -> Split:
    """Return a split of the dataset file. Raises `UserError`, which names the job file's key."""
    with in_section("data", "arguments" if data.arguments else "path"):
        return open_split(data.path, split, data.arguments)


class LoaderFactory(Protocol):
    """An object that makes the sampler and the batches of this rank."""

    def sampler(self, train: Split, config: Config) -> Sampler: ...

    def batches(self, sampler: Sampler, data: DataSection) -> Batches | InjectedBatches:
        """Return the batches of this rank; those of its group have `data.group_batch_size` samples."""
        ...


def loader_factory(topology: Topology) -> LoaderFactory:
    return LoadersOfReplicaGroups(topology) if topology.is_elastic else LoadersOfRanks(topology)


@dataclass(frozen=True)
class LoadersOfRanks:
    """A factory for static runs: every rank has its own samples."""

    place: Topology | AsRank

    def sampler(self, train: Split, config: Config) -> Sampler:
        return _sampler(train, self.place, config)

    def batches(self, sampler: Sampler, data: DataSection) -> Batches | InjectedBatches:
        P, b = self.place.num_groups, batch_of_rank(data.group_batch_size, self.place.group_size)
        injection = make_injection(data)
        if injection is not None and P == 1:
            log.warning("[data] injection: ignored, because there is only one group")
        if injection is None or P == 1:
            return _some(Batches(sampler, b))
        with in_section("data", "injection"):
            batches = InjectedBatches(sampler, self.place, b, injection)
        if not len(batches):
            raise UserError(
                f"[data] injection: a rank has {count_text(len(sampler), 'sample')} an epoch, and loads "
                f"{batches.portions.own + batches.portions.shared} in a step",
                key=("data", "injection"),
            )
        return batches


@dataclass(frozen=True)
class LoadersOfReplicaGroups:
    """A factory for elastic runs: every replica group has its own samples, divided among its ranks."""

    topology: Topology

    def sampler(self, train: Split, config: Config) -> Sampler:
        partition = make_partition(config.data)
        if partition is not None and not partition.allows_elastic_groups:
            raise UserError(
                f"[data] partition: {partition} needs a fixed number of groups, but groups of `hpcsgd "
                "launch` may leave and return: use overlapping",
                key=("data", "partition"),
            )
        return _sampler(
            train, AsRank(self.topology.replica_groups.index, self.topology.replica_groups.count), config
        )

    def batches(self, sampler: Sampler, data: DataSection) -> Batches:
        B, K = data.group_batch_size, self.topology.group_size
        if data.injection is not None:
            raise UserError(
                "[data] injection: groups that `hpcsgd launch` starts do not share samples",
                key=("data", "injection"),
            )
        if B < K:
            raise UserError(
                f"[data] group_batch_size = {B} is the batch of a group of {count_text(K, 'rank')}: too few "
                "samples",
                key=("data", "group_batch_size"),
                value=B,
            )
        return _some(Batches(sampler, B, K, self.topology.shard_index))


def _some(batches: Batches) -> Batches:
    with in_section("data", "group_batch_size"):
        require_a_batch(batches)
    return batches


def _sampler(train: Split, place: Topology | AsRank, config: Config) -> Sampler:
    partition = make_partition(config.data)
    with in_section("data", "path" if partition is None else "partition"):
        return Sampler(train, place, seed=config.seed, partition=partition, labels=train.labels)


def batch_of_rank(B: int, K: int) -> int:
    if B % K:
        raise UserError(
            f"[data] group_batch_size = {B} is the batch of a group of {count_text(K, 'rank')}: give a "
            f"multiple of {K}",
            key=("data", "group_batch_size"),
            value=B,
        )
    return B // K


def make_partition(data: DataSection) -> Partition | None:
    if data.partition is None:
        return None if data.overlap_share is None else Overlapping(data.overlap_share)
    if data.overlap_share is not None:
        raise UserError(
            f"[data] overlap_share = {data.overlap_share}: give overlap_share or partition, not both",
            key=("data", "overlap_share"),
            value=data.overlap_share,
        )
    with in_section("data", "partition"):
        return _partition(data.partition)


def _partition(table: Mapping[str, Any]) -> Partition:
    arguments = {key: value for key, value in table.items() if key != "name"}
    name = table.get("name")
    if not isinstance(name, str):
        raise UserError(
            f"name = {name!r}: expected one of {', '.join(sorted(PARTITIONS))}", key="name", value=name
        )
    made = call_named(name, resolve(name, PARTITIONS), PARTITIONS, arguments)
    if not isinstance(made, Partition):
        raise UserError(f"{name!r} returned {type(made).__name__}, expected a Partition")
    return made


def make_injection(data: DataSection) -> Injection | None:
    if data.injection is None:
        return None
    with in_section("data", "injection"):
        return call(Injection, data.injection)


def require_divisible(config: Config, P: int, K: int) -> None:
    """Raise `UserError` if the samples cannot be divided among P groups of K ranks as configured."""
    first = LoadersOfRanks(AsRank(0, P * K, K))
    first.batches(first.sampler(opened(config.data, "train"), config), config.data)
