"""Tests that a new part needs one line, in the table of its family, and that a user's part needs none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim

from hpcsgd.config.schema import load
from hpcsgd.core.averager import Averager
from hpcsgd.core.graphs import GRAPHS, PowersOfTwo
from hpcsgd.core.method import Method
from hpcsgd.core.step import GradReduce
from hpcsgd.errors import UserError
from hpcsgd.methods import METHODS, hierarchical
from hpcsgd.methods.selsync import AGGREGATES, parameters
from hpcsgd.parts.averagers import (
    CLIPS,
    GUARDS,
    MERGES,
    MESSAGE_MEANS,
    OPTIMIZER_STATE,
    SELECTIONS,
    AverageState,
    MedianNorm,
    OverSenders,
    PerBlock,
    PseudoGradientPenalty,
    RadialDirectional,
)
from hpcsgd.parts.grad_reduces import GRAD_REDUCES, AllToAll, Dense, ErrorFeedback, Plain, union
from hpcsgd.parts.grad_reduces.codecs import CODECS
from hpcsgd.parts.grad_reduces.combining import COMBINING
from hpcsgd.parts.grad_reduces.error_feedback import FEEDBACKS
from hpcsgd.parts.outer_schedules import OUTER_SCHEDULES
from hpcsgd.parts.outer_schedules.base import OuterValues
from hpcsgd.parts.outer_schedules.muloco import ByGroups
from hpcsgd.parts.quantizers import QUANTIZERS, ROUNDINGS, Nearest, int2
from hpcsgd.parts.quantizers.halves import Halves
from hpcsgd.parts.schedules import LOCAL_STEPS, DynamicLocalSteps, Every
from hpcsgd.parts.sparsifiers import SPARSIFIERS, TopK
from hpcsgd.train.families import FAMILIES, OPTIMIZERS
from hpcsgd.train.parts import make_method
from train.launches import JOB

STEPS_PER_EPOCH = 10


@dataclass(frozen=True)
class AGradReduce(AllToAll):
    rounds: int = 1


class ACodec(Plain):
    pass


class AFeedback(ErrorFeedback):
    pass


class AGraph(PowersOfTwo):
    pass


class ASparsifier(TopK):
    pass


class AnOuterSchedule(ByGroups):
    def __init__(self) -> None:
        super().__init__({2: OuterValues(lr=0.5)})


class AWire(Halves):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


class ARounding(Nearest):
    pass


class ASelection(PerBlock):
    pass


class AMessageMean(OverSenders):
    pass


class AClip(MedianNorm):
    pass


class AMerge(RadialDirectional):
    pass


class AGuard(PseudoGradientPenalty):
    pass


class LocalSteps(DynamicLocalSteps):
    pass


class AnOptimizer(optim.SGD):
    pass


def moments(inner: Averager) -> Averager:
    return AverageState(inner)


def aggregate(*of: Any) -> Averager:
    return AverageState(parameters(*of))


def combine(*of: Any) -> Any:
    return union(*of)


def method(sync_every: int, grad_reduce: GradReduce = Dense(), label="") -> Method:  # noqa: B008
    assert label in ("", "topk"), "what is said of it was taken for something"
    return hierarchical(sync_every, grad_reduce)


def made(tmp_path: Path, text: str) -> Any:
    """Return the method of a job file with this text as its section."""
    job = JOB.replace('name = "hierarchical"\nsync_every = 2\n', text)
    assert job != JOB
    (tmp_path / "job.toml").write_text(job)
    return make_method(load(tmp_path / "job.toml").method, STEPS_PER_EPOCH)


LOCAL = 'name = "hierarchical"\nsync_every = 2\n'
SPARSE = LOCAL + 'grad_reduce = {{ name = "sparse", sparsifier = {{ name = "topk", density = 0.5 }}, {} }}\n'
Case = tuple[Any, Any, str, Callable[[Any], Any]]
NEW: dict[str, Case] = {
    "a codec": (CODECS, ACodec, SPARSE.format('indices = "NEW"'), lambda m: type(m.grad_reduce.indices)),
    "combining": (COMBINING, combine, SPARSE.format('combine = "NEW"'), lambda m: m.grad_reduce.combine),
    "feedback": (
        FEEDBACKS,
        AFeedback,
        SPARSE.format('feedback = "NEW"'),
        lambda m: type(m.grad_reduce.feedback),
    ),
    "a sparsifier": (
        SPARSIFIERS,
        ASparsifier,
        LOCAL + 'grad_reduce = { name = "sparse", sparsifier = { name = "NEW", density = 0.5 } }\n',
        lambda m: type(m.grad_reduce.sparsifier),
    ),
    "a gradient reduction": (
        GRAD_REDUCES,
        AGradReduce,
        LOCAL + 'grad_reduce = "NEW"\n',
        lambda m: type(m.grad_reduce),
    ),
    "one of groups": (
        GRAD_REDUCES,
        AGradReduce,
        'name = "bsp"\ngrad_reduce = { name = "NEW", rounds = { epoch = 2 } }\n',
        lambda m: type(m.grad_reduce.inner) if m.grad_reduce.inner.rounds == 2 * STEPS_PER_EPOCH else None,
    ),
    "a wire": (QUANTIZERS, AWire, LOCAL + 'quantize = "NEW"\n', lambda m: type(m.averager.inner.wire)),
    "an outer schedule": (
        OUTER_SCHEDULES,
        AnOuterSchedule,
        'name = "diloco"\nsync_every = 2\nouter_schedule = "NEW"\n',
        lambda m: type(m.averager.schedule),
    ),
    "a rounding": (
        ROUNDINGS,
        ARounding,
        LOCAL + 'grad_reduce = { name = "quantized", parameters = { name = "int4", rounding = "NEW" } }\n',
        lambda m: type(m.grad_reduce.parameters.rounding),
    ),
    "a graph": (
        GRAPHS,
        AGraph,
        'name = "sgp"\ngraph = { name = "NEW", per_step = 2 }\n',
        lambda m: type(m.averager.graph),
    ),
    "moments": (
        OPTIMIZER_STATE,
        moments,
        LOCAL + 'optimizer_state = "NEW"\n',
        lambda m: type(m.averager) is AverageState and moments,
    ),
    "an aggregate": (
        AGGREGATES,
        aggregate,
        'name = "selsync"\ndelta = 1\naggregate = "NEW"\n',
        lambda m: type(m.averager) is AverageState and aggregate,
    ),
    "a selection": (
        SELECTIONS,
        ASelection,
        'name = "sparseloco"\nsync_every = 2\nselection = { name = "NEW", size = 7 }\n',
        lambda m: type(m.averager.inner.select),
    ),
    "a mean of messages": (
        MESSAGE_MEANS,
        AMessageMean,
        'name = "sparseloco"\nsync_every = 2\nmean = "NEW"\n',
        lambda m: type(m.averager.inner.mean),
    ),
    "a clip": (
        CLIPS,
        AClip,
        'name = "sparseloco"\nsync_every = 2\nclip = "NEW"\n',
        lambda m: type(m.averager.inner.clip),
    ),
    "a guard": (
        GUARDS,
        AGuard,
        LOCAL + 'guard = { name = "NEW", threshold = 7 }\n',
        lambda m: type(m.averager.inner.guard) if m.averager.inner.guard.threshold == 7 else None,
    ),
    "a merge": (
        MERGES,
        AMerge,
        'name = "diloco"\nsync_every = 2\nmerge = { name = "NEW", plain_mean = ["wpe"] }\n',
        lambda m: (
            type(m.averager.inner.inner.merge) if m.averager.inner.inner.merge.plain_mean == ["wpe"] else None
        ),
    ),
    "local steps": (
        LOCAL_STEPS,
        LocalSteps,
        'name = "async_diloco"\nsync_every = 9\nlocal_steps = { name = "NEW", min_steps = 7 }\n',
        lambda m: type(m.schedule._dynamic) if m.schedule._dynamic.min_steps == 7 else None,
    ),
    "an optimizer": (
        OPTIMIZERS,
        AnOptimizer,
        'name = "diloco"\nsync_every = 2\nouter = { name = "NEW", lr = 0.1 }\n',
        lambda m: type(m.averager.make_optimizer([torch.zeros(1)])),
    ),
    "a method": (
        METHODS,
        method,
        'name = "switch"\nat = { epoch = 1 }\nfirst = { name = "bsp" }\n'
        'then = { name = "NEW", sync_every = 3 }\n',
        lambda m: method if m.averager._turn.then == hierarchical(3) and m.averager._turn.at == 10 else None,
    ),
}


def test_methods_around_methods(tmp_path: Path) -> None:
    inner = 'method = { name = "diloco", sync_every = 4, outer = { name = "SGD", lr = 0.5 } }\n'
    late = made(tmp_path, f'name = "delayed"\nsync_delay = 3\n{inner}')
    assert late.averager.steps == 3
    assert late.schedule == Every(4)
    in_turn = made(
        tmp_path, f'name = "streaming"\nnum_fragments = 2\nsync_delay = 1\nupdate_alpha = 0.25\n{inner}'
    )
    assert (in_turn.schedule.offsets, in_turn.averager.delay, in_turn.averager.blend) == ([0, 2], 1, 0.25)
    for how in (late.averager.inner, in_turn.averager.how):
        assert how.make_optimizer([torch.zeros(1)]).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bits = 3", r"\[method\]: bits = 3: expected 2, 4, 8, 16, 32"),
        ("density = 0", r"\[method\]: density = 0: the share of elements to send, > 0 and ≤ 1"),
        ('selection = { name = "per_block", size = 0 }', "size = 0: a number of elements, ≥ 1"),
    ],
)
def test_sparse_synchronizations_that_cannot_be(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        made(tmp_path, f'name = "sparseloco"\nsync_every = 2\n{line}\n')
    assert "\n" not in str(caught.value)


def test_intervals_of_optimizer_state(tmp_path: Path) -> None:
    text = 'name = "des_loc"\nsync_every = 4\nfirst_every = { epoch = 1 }\n'
    text += "optimizer_state = { exp_avg_sq = 40 }\n"
    how = made(tmp_path, f'{text}quantize = "int2"\n').averager
    found = [how.periods.of(name) for name in ("exp_avg", "max_exp_avg_sq", "exp_avg_sq", "sums")]
    assert found == [10, 24, 40, None]
    assert how.inner.inner.wire == int2()


@pytest.mark.parametrize("name", NEW)
def test_a_new_part_needs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    table, part, text, read = NEW[name]
    monkeypatch.setitem(table, "planted", part)
    assert read(made(tmp_path, text.replace("NEW", "planted"))) is part


@pytest.mark.parametrize("name", NEW)
def test_a_part_of_the_user(tmp_path: Path, name: str) -> None:
    _, part, text, read = NEW[name]
    assert read(made(tmp_path, text.replace("NEW", f"{__name__}:{part.__name__}"))) is part


def test_every_family_is_tried() -> None:
    assert {id(table) for table, *_ in NEW.values()} == {id(table) for table in FAMILIES.values()}


def test_a_method_of_the_user_with_parts(tmp_path: Path) -> None:
    """A parameter without annotation gets the job file's value, even if a part has that name."""
    text = (
        f'name = "{__name__}:method"\nsync_every = {{ epoch = 2 }}\ngrad_reduce = "reduce_scatter"\n'
        'label = "topk"\n'
    )
    assert made(tmp_path, text) == hierarchical(20, GRAD_REDUCES["reduce_scatter"]())
