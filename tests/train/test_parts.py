"""A new part needs one line, in the table beside its family, and a user's own needs none."""

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
from hpcsgd.core.step import Exchange
from hpcsgd.errors import UserError
from hpcsgd.methods import METHODS, hierarchical
from hpcsgd.methods.selsync import AGGREGATES, parameters
from hpcsgd.parts.averagers import MOMENTS, SELECTIONS, Averaged, PerRun
from hpcsgd.parts.exchanges import EXCHANGES, AllToAll, Dense, ErrorFeedback, Plain, everyones
from hpcsgd.parts.exchanges.codecs import CODECS
from hpcsgd.parts.exchanges.combining import COMBINING
from hpcsgd.parts.exchanges.feedback import FEEDBACKS
from hpcsgd.parts.schedules import Every
from hpcsgd.parts.sparsifiers import SPARSIFIERS, TopK
from hpcsgd.parts.wires import ROUNDINGS, WIRES, Nearest, int2
from hpcsgd.parts.wires.halves import Halves
from hpcsgd.train.families import FAMILIES, OPTIMIZERS
from hpcsgd.train.parts import make_method
from train.launches import JOB

STEPS_PER_EPOCH = 10


@dataclass(frozen=True)
class AnExchange(AllToAll):
    rounds: int = 1


class ACodec(Plain):
    pass


class AFeedback(ErrorFeedback):
    pass


class AGraph(PowersOfTwo):
    pass


class ASparsifier(TopK):
    pass


class AWire(Halves):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


class ARounding(Nearest):
    pass


class ASelection(PerRun):
    pass


class AnOptimizer(optim.SGD):
    pass


def moments(inner: Averager) -> Averager:
    return Averaged(inner)


def aggregate(*of: Any) -> Averager:
    return Averaged(parameters(*of))


def combine(*of: Any) -> Any:
    return everyones(*of)


def method(every: int, exchange: Exchange = Dense(), label="") -> Method:  # noqa: B008
    assert label in ("", "topk"), "what is said of it was taken for something"
    return hierarchical(every, exchange)


def made(tmp_path: Path, text: str) -> Any:
    """By a job file that has this as its section."""
    job = JOB.replace('name = "hierarchical"\nevery = 2\n', text)
    assert job != JOB
    (tmp_path / "job.toml").write_text(job)
    return make_method(load(tmp_path / "job.toml").method, STEPS_PER_EPOCH)


LOCAL = 'name = "hierarchical"\nevery = 2\n'
SPARSE = LOCAL + 'exchange = {{ name = "sparse", sparsifier = {{ name = "topk", density = 0.5 }}, {} }}\n'
Case = tuple[Any, Any, str, Callable[[Any], Any]]
NEW: dict[str, Case] = {
    "a codec": (CODECS, ACodec, SPARSE.format('indices = "NEW"'), lambda m: type(m.exchange.indices)),
    "combining": (COMBINING, combine, SPARSE.format('combine = "NEW"'), lambda m: m.exchange.combine),
    "feedback": (
        FEEDBACKS,
        AFeedback,
        SPARSE.format('feedback = "NEW"'),
        lambda m: type(m.exchange.feedback),
    ),
    "a sparsifier": (
        SPARSIFIERS,
        ASparsifier,
        LOCAL + 'exchange = { name = "sparse", sparsifier = { name = "NEW", density = 0.5 } }\n',
        lambda m: type(m.exchange.sparsifier),
    ),
    "an exchange": (EXCHANGES, AnExchange, LOCAL + 'exchange = "NEW"\n', lambda m: type(m.exchange)),
    "one of groups": (
        EXCHANGES,
        AnExchange,
        'name = "bsp"\nexchange = { name = "NEW", rounds = { epoch = 2 } }\n',
        lambda m: type(m.exchange.inner) if m.exchange.inner.rounds == 2 * STEPS_PER_EPOCH else None,
    ),
    "a wire": (WIRES, AWire, LOCAL + 'average = "NEW"\n', lambda m: type(m.how.inner.wire)),
    "a rounding": (
        ROUNDINGS,
        ARounding,
        LOCAL + 'exchange = { name = "packed", parameters = { name = "int4", rounding = "NEW" } }\n',
        lambda m: type(m.exchange.parameters.rounding),
    ),
    "a graph": (
        GRAPHS,
        AGraph,
        'name = "sgp"\ngraph = { name = "NEW", per_step = 2 }\n',
        lambda m: type(m.how.graph),
    ),
    "moments": (
        MOMENTS,
        moments,
        LOCAL + 'moments = "NEW"\n',
        lambda m: type(m.how) is Averaged and moments,
    ),
    "an aggregate": (
        AGGREGATES,
        aggregate,
        'name = "selsync"\ndelta = 1\naggregate = "NEW"\n',
        lambda m: type(m.how) is Averaged and aggregate,
    ),
    "a selection": (
        SELECTIONS,
        ASelection,
        'name = "sparse_loco"\nevery = 2\nselect = { name = "NEW", size = 7 }\n',
        lambda m: type(m.how.inner.select),
    ),
    "an optimizer": (
        OPTIMIZERS,
        AnOptimizer,
        'name = "diloco"\nevery = 2\nouter = { build = "NEW", lr = 0.1 }\n',
        lambda m: type(m.how.make_optimizer([torch.zeros(1)])),
    ),
    "a method": (
        METHODS,
        method,
        'name = "switch"\nat = { epoch = 1 }\nfirst = { name = "bsp" }\nthen = { name = "NEW", every = 3 }\n',
        lambda m: method if m.how._turn.then == hierarchical(3) and m.how._turn.at == 10 else None,
    ),
}


def test_methods_around_methods(tmp_path: Path) -> None:
    inner = 'method = { name = "diloco", every = 4, outer = { build = "SGD", lr = 0.5 } }\n'
    late = made(tmp_path, f'name = "delayed"\nsteps = 3\n{inner}')
    assert late.how.steps == 3
    assert late.when == Every(4)
    in_turn = made(tmp_path, f'name = "streamed"\nfragments = 2\ndelay = 1\nblend = 0.25\n{inner}')
    assert (in_turn.when.offsets, in_turn.how.delay, in_turn.how.blend) == ([0, 2], 1, 0.25)
    for how in (late.how.inner, in_turn.how.how):
        assert how.make_optimizer([torch.zeros(1)]).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bits = 3", r"\[method\]: bits = 3: expected 2, 4, 8, 16, 32"),
        ("density = 0", r"\[method\]: density = 0: the share of elements to send, > 0 and ≤ 1"),
        ('select = { name = "per_run", size = 0 }', "size = 0: a number of elements, ≥ 1"),
    ],
)
def test_sparse_meetings_that_cannot_be(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        made(tmp_path, f'name = "sparse_loco"\nevery = 2\n{line}\n')
    assert "\n" not in str(caught.value)


def test_intervals_of_moments(tmp_path: Path) -> None:
    text = 'name = "des_loco"\nevery = 4\nfirst = { epoch = 1 }\nmoments = { exp_avg_sq = 40 }\n'
    how = made(tmp_path, f'{text}average = "int2"\n').how
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
    """What has no annotation is given what the job file says, whatever else has that name."""
    text = (
        f'name = "{__name__}:method"\nevery = {{ epoch = 2 }}\nexchange = "reduce_scatter"\nlabel = "topk"\n'
    )
    assert made(tmp_path, text) == hierarchical(20, EXCHANGES["reduce_scatter"]())
