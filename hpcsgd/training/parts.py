"""The names that a job file has for methods and their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import optim
from torch.optim.lr_scheduler import LRScheduler

from hpcsgd.averagers.moments import MOMENTS, AroundMoments
from hpcsgd.averagers.selection import SELECTIONS, Selection
from hpcsgd.config.parts import Parts
from hpcsgd.config.schema import Config
from hpcsgd.core.graphs import GRAPHS, Graph
from hpcsgd.core.method import Method
from hpcsgd.core.step import Exchange, GroupExchange
from hpcsgd.engine.muon import muon
from hpcsgd.exchanges import EXCHANGES
from hpcsgd.exchanges.codecs import CODECS, Codec
from hpcsgd.exchanges.combining import COMBINING, Combine
from hpcsgd.exchanges.feedback import FEEDBACKS, Feedback
from hpcsgd.methods import METHODS
from hpcsgd.methods.diloco import MakeOptimizer
from hpcsgd.methods.selsync import AGGREGATES, Aggregate
from hpcsgd.sparsifiers import SPARSIFIERS, Sparsifier
from hpcsgd.wires import ROUNDINGS, WIRES
from hpcsgd.wires.base import Rounding, Wire


def _subclasses(module: Any, base: type) -> dict[str, type]:
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    public = {name: cls for name, cls in found.items() if not name.startswith("_")}
    return {name: cls for name, cls in public.items() if issubclass(cls, base) and cls is not base}


OPTIMIZERS = _subclasses(optim, optim.Optimizer)
"""For tensors of any kind, as outer optimizers are."""
OF_A_MODEL: Mapping[str, Callable[..., optim.Optimizer]] = {**OPTIMIZERS, "Muon": muon}
"""For a model's parameters, or for a model: for what the first parameter is annotated with."""
SCHEDULERS = _subclasses(optim.lr_scheduler, LRScheduler)

FAMILIES: Mapping[Any, Mapping[str, Callable[..., Any]]] = {
    Aggregate: AGGREGATES,
    AroundMoments: MOMENTS,
    Codec: CODECS,
    Combine: COMBINING,
    Exchange: EXCHANGES,
    Feedback: FEEDBACKS,
    Graph: GRAPHS,
    GroupExchange: EXCHANGES,
    MakeOptimizer: OPTIMIZERS,
    Method: METHODS,
    Rounding: ROUNDINGS,
    Selection: SELECTIONS,
    Sparsifier: SPARSIFIERS,
    Wire: WIRES,
}
"""By what the parameters for them are annotated with; each table stands beside what it names."""


def make_method(config: Config, steps_per_epoch: int) -> Method:
    """Raises `UserError`, naming the key of the job file."""
    table = {"name": config.method.name, **config.method.arguments}
    return Parts(FAMILIES, steps_per_epoch).make(Method, table, "[method]")
