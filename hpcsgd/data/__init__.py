"""Data for training: conversion to dataset files, reading samples, samplers, augmentation."""

from __future__ import annotations

from hpcsgd.data.arrays import Arrays
from hpcsgd.data.assignment import AsRank
from hpcsgd.data.augment import crop_and_flip
from hpcsgd.data.batches import Batches
from hpcsgd.data.convert import Summary, convert, convert_images, convert_npz, convert_pairs, convert_text
from hpcsgd.data.drawing import Stream
from hpcsgd.data.equal import equal_batches
from hpcsgd.data.formats import READERS
from hpcsgd.data.image_dataset import ImageDataset
from hpcsgd.data.image_files import ImageFiles
from hpcsgd.data.injection import Injected, InjectedBatches, Injection
from hpcsgd.data.loader import Loader, read_batches, reading, require_a_batch
from hpcsgd.data.loader_processes import require_num_workers
from hpcsgd.data.open_split import open_split
from hpcsgd.data.pairs import Pairs
from hpcsgd.data.partition import PARTITIONS, ByLabel, DefDP, Dirichlet, Overlapping, Partition, SelDP
from hpcsgd.data.ratings import Ratings
from hpcsgd.data.sampler import Sampler
from hpcsgd.data.split import Batch, Split, collate, varied
from hpcsgd.data.windows import Windows

__all__ = [
    "PARTITIONS",
    "READERS",
    "Arrays",
    "AsRank",
    "Batch",
    "Batches",
    "ByLabel",
    "DefDP",
    "Dirichlet",
    "ImageDataset",
    "ImageFiles",
    "Injected",
    "InjectedBatches",
    "Injection",
    "Loader",
    "Overlapping",
    "Pairs",
    "Partition",
    "Ratings",
    "Sampler",
    "SelDP",
    "Split",
    "Stream",
    "Summary",
    "Windows",
    "collate",
    "convert",
    "convert_images",
    "convert_npz",
    "convert_pairs",
    "convert_text",
    "crop_and_flip",
    "equal_batches",
    "open_split",
    "read_batches",
    "reading",
    "require_a_batch",
    "require_num_workers",
    "varied",
]
