"""Data for training: conversion to a store, the store, the sampler, augmentation."""

from __future__ import annotations

from hpcsgd.data.augment import crop_and_flip
from hpcsgd.data.batches import Batches
from hpcsgd.data.convert import Summary, convert
from hpcsgd.data.formats import READERS
from hpcsgd.data.injection import Injected, InjectedBatches, Injection
from hpcsgd.data.partition import PARTITIONS, ByLabel, DefDP, Dirichlet, Overlapping, Partition, SelDP
from hpcsgd.data.sampler import Sampler, Seat
from hpcsgd.data.store import Batch, Store, collate

__all__ = [
    "PARTITIONS",
    "READERS",
    "Batch",
    "Batches",
    "ByLabel",
    "DefDP",
    "Dirichlet",
    "Injected",
    "InjectedBatches",
    "Injection",
    "Overlapping",
    "Partition",
    "Sampler",
    "Seat",
    "SelDP",
    "Store",
    "Summary",
    "collate",
    "convert",
    "crop_and_flip",
]
