"""The names that job files and scenarios use for methods and their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import optim

from hpcsgd.config.parts import Parts
from hpcsgd.core.graphs import GRAPHS, Graph
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce, GroupGradReduce
from hpcsgd.methods import METHODS
from hpcsgd.methods.selsync import AGGREGATES, Aggregate
from hpcsgd.parts.averagers.optimizer_state import OPTIMIZER_STATE, WithOptimizerState
from hpcsgd.parts.averagers.outer_step import MakeOptimizer
from hpcsgd.parts.averagers.pseudo_gradient_penalty import GUARDS, PseudoGradientPenalty
from hpcsgd.parts.averagers.radial_directional import MERGES, RadialDirectional
from hpcsgd.parts.averagers.selection import SELECTIONS, Selection
from hpcsgd.parts.averagers.sparse_message import CLIPS, MESSAGE_MEANS, MedianNorm, MessageMean
from hpcsgd.parts.grad_reduces import GRAD_REDUCES
from hpcsgd.parts.grad_reduces.codecs import CODECS, Codec
from hpcsgd.parts.grad_reduces.combining import COMBINING, Combine
from hpcsgd.parts.grad_reduces.error_feedback import FEEDBACKS, Feedback
from hpcsgd.parts.outer_schedules import OUTER_SCHEDULES
from hpcsgd.parts.outer_schedules.base import OuterSchedule
from hpcsgd.parts.quantizers import QUANTIZERS, ROUNDINGS
from hpcsgd.parts.quantizers.base import Quantizer, Rounding
from hpcsgd.parts.schedules import LOCAL_STEPS, DynamicLocalSteps
from hpcsgd.parts.sparsifiers import SPARSIFIERS, Sparsifier


def subclasses(module: ModuleType, base: type) -> dict[str, type]:
    """Return the public subclasses of `base` in `module`, by their names."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    public = {name: cls for name, cls in found.items() if not name.startswith("_")}
    return {name: cls for name, cls in public.items() if issubclass(cls, base) and cls is not base}


OPTIMIZERS = subclasses(optim, optim.Optimizer)
"""Optimizers for tensors of any kind, such as outer optimizers."""

FAMILIES: Mapping[Any, Mapping[str, Callable[..., Any]]] = {
    Aggregate: AGGREGATES,
    WithOptimizerState: OPTIMIZER_STATE,
    Codec: CODECS,
    Combine: COMBINING,
    DynamicLocalSteps: LOCAL_STEPS,
    GradReduce: GRAD_REDUCES,
    Feedback: FEEDBACKS,
    Graph: GRAPHS,
    GroupGradReduce: GRAD_REDUCES,
    MakeOptimizer: OPTIMIZERS,
    MedianNorm: CLIPS,
    MessageMean: MESSAGE_MEANS,
    Method: METHODS,
    OuterSchedule: OUTER_SCHEDULES,
    PseudoGradientPenalty: GUARDS,
    RadialDirectional: MERGES,
    Rounding: ROUNDINGS,
    Selection: SELECTIONS,
    Sparsifier: SPARSIFIERS,
    Quantizer: QUANTIZERS,
}
"""By type of a parameter: the names that job files use for its values, and functions that make them."""


def method_of(
    table: Mapping[str, Any], steps_per_epoch: int | None, total_steps: int | None = None
) -> Method:
    """Return the method that a section ``[method]`` names, for a run of `total_steps`, if they are known.

    Raises:
        UserError: If the section names no method, or an argument is wrong. The error names the key.
    """
    return Parts(FAMILIES, steps_per_epoch, total_steps).make(Method, table, "method")
