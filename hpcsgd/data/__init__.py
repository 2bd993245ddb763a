"""Data for training: conversion to a store, the store, the sampler, augmentation."""

from __future__ import annotations

from hpcsgd.data.augment import crop_and_flip
from hpcsgd.data.batches import Batches
from hpcsgd.data.convert import Summary, convert
from hpcsgd.data.formats import READERS
from hpcsgd.data.sampler import Sampler, Seat
from hpcsgd.data.store import Batch, Store, collate

__all__ = [
    "READERS",
    "Batch",
    "Batches",
    "Sampler",
    "Seat",
    "Store",
    "Summary",
    "collate",
    "convert",
    "crop_and_flip",
]
