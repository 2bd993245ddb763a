"""Training of neural networks on supercomputers with far less communication.

job = hpcsgd.init(groups=4)
loader = DataLoader(data, batch, sampler=hpcsgd.Sampler(data, job))
optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, method=hpcsgd.hierarchical(every=8))

In the examples of docstrings four ranks are a `job` of 2 groups of 2, with a small `model`, plain SGD as its
`optimizer`, `data`, a `criterion`, an empty `folder`, and `train(optimizer, steps)`, which is the training
loop of the README.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcsgd import wires
    from hpcsgd.averagers import Averaged, OverPositions, PerRun, Reset, kept
    from hpcsgd.checkpoint.in_scripts import load, save
    from hpcsgd.core import graphs
    from hpcsgd.core.topology import Job
    from hpcsgd.data import (
        ByLabel,
        DefDP,
        Dirichlet,
        Injected,
        InjectedBatches,
        Injection,
        Loader,
        Overlapping,
        Sampler,
        SelDP,
        equal_batches,
    )
    from hpcsgd.engine.joined import Joined
    from hpcsgd.engine.lr import WarmUp, lr_scale
    from hpcsgd.engine.muon import muon
    from hpcsgd.engine.optimizer import DistributedOptimizer
    from hpcsgd.engine.scaling import GradScaler
    from hpcsgd.errors import JobError, UserError
    from hpcsgd.exchanges import (
        AllToAll,
        Dense,
        MomentumCorrection,
        Packed,
        RateInside,
        ReduceScatter,
        Sparse,
    )
    from hpcsgd.methods import (
        Method,
        ad_psgd,
        adacomm,
        allreduce_local_sgd,
        async_sgd,
        bsp,
        d_psgd,
        delayed,
        des_loco,
        diloco,
        ensemble,
        fedavg,
        hierarchical,
        no_loco,
        osgp,
        post_local,
        sasgd,
        selsync,
        sgp,
        sparse_loco,
        ssp,
        streamed,
        switch,
    )
    from hpcsgd.models.sharded import shard
    from hpcsgd.models.sync_batch_norm import sync_batch_norm
    from hpcsgd.natural_gradient import NaturalGradient
    from hpcsgd.sparsifiers import CLTk, Deft, HardThreshold, SIDCo, TopK
    from hpcsgd.start import init
    from hpcsgd.tuning.own import probe

# Where each name is; the imports above, this and `__all__` are kept in step by tests/test_docstrings.py.
_HOMES = {
    "AllToAll": "exchanges",
    "Averaged": "averagers",
    "ByLabel": "data",
    "CLTk": "sparsifiers",
    "DefDP": "data",
    "Deft": "sparsifiers",
    "Dense": "exchanges",
    "Dirichlet": "data",
    "DistributedOptimizer": "engine.optimizer",
    "GradScaler": "engine.scaling",
    "HardThreshold": "sparsifiers",
    "Injected": "data",
    "InjectedBatches": "data",
    "Injection": "data",
    "Job": "core.topology",
    "JobError": "errors",
    "Joined": "engine.joined",
    "Loader": "data",
    "Method": "methods",
    "MomentumCorrection": "exchanges",
    "NaturalGradient": "natural_gradient",
    "Overlapping": "data",
    "OverPositions": "averagers",
    "Packed": "exchanges",
    "PerRun": "averagers",
    "RateInside": "exchanges",
    "ReduceScatter": "exchanges",
    "Reset": "averagers",
    "SIDCo": "sparsifiers",
    "Sampler": "data",
    "SelDP": "data",
    "Sparse": "exchanges",
    "TopK": "sparsifiers",
    "UserError": "errors",
    "WarmUp": "engine.lr",
    "ad_psgd": "methods",
    "adacomm": "methods",
    "allreduce_local_sgd": "methods",
    "async_sgd": "methods",
    "bsp": "methods",
    "d_psgd": "methods",
    "delayed": "methods",
    "des_loco": "methods",
    "diloco": "methods",
    "ensemble": "methods",
    "equal_batches": "data",
    "fedavg": "methods",
    "graphs": "core",
    "hierarchical": "methods",
    "init": "start",
    "kept": "averagers",
    "load": "checkpoint.in_scripts",
    "lr_scale": "engine.lr",
    "muon": "engine.muon",
    "no_loco": "methods",
    "osgp": "methods",
    "post_local": "methods",
    "probe": "tuning.own",
    "sasgd": "methods",
    "save": "checkpoint.in_scripts",
    "selsync": "methods",
    "shard": "models.sharded",
    "sgp": "methods",
    "sparse_loco": "methods",
    "ssp": "methods",
    "streamed": "methods",
    "switch": "methods",
    "sync_batch_norm": "models.sync_batch_norm",
    "wires": "",
}

__all__ = [
    "AllToAll",
    "Averaged",
    "ByLabel",
    "CLTk",
    "DefDP",
    "Deft",
    "Dense",
    "Dirichlet",
    "DistributedOptimizer",
    "GradScaler",
    "HardThreshold",
    "Injected",
    "InjectedBatches",
    "Injection",
    "Job",
    "JobError",
    "Joined",
    "Loader",
    "Method",
    "MomentumCorrection",
    "NaturalGradient",
    "OverPositions",
    "Overlapping",
    "Packed",
    "PerRun",
    "RateInside",
    "ReduceScatter",
    "Reset",
    "SIDCo",
    "Sampler",
    "SelDP",
    "Sparse",
    "TopK",
    "UserError",
    "WarmUp",
    "ad_psgd",
    "adacomm",
    "allreduce_local_sgd",
    "async_sgd",
    "bsp",
    "d_psgd",
    "delayed",
    "des_loco",
    "diloco",
    "ensemble",
    "equal_batches",
    "fedavg",
    "graphs",
    "hierarchical",
    "init",
    "kept",
    "load",
    "lr_scale",
    "muon",
    "no_loco",
    "osgp",
    "post_local",
    "probe",
    "sasgd",
    "save",
    "selsync",
    "sgp",
    "shard",
    "sparse_loco",
    "ssp",
    "streamed",
    "switch",
    "sync_batch_norm",
    "wires",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: the command line answers `--help` without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _HOMES[name]:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """For completion at the prompt, which would not see what is only imported when asked for."""
    return sorted({*globals(), *_HOMES})
