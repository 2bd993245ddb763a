"""What every method of `METHODS` is compared with: the same training in plain torch.

A method without such a reference has an entry that gives the reason and the invariants tested instead. A
new method needs an entry here: all tests of every method are parametrized with these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from torch import Tensor, optim

from hpcsgd.comm import Communicator
from hpcsgd.comm.alike import Fact, require_alike
from hpcsgd.core.graphs import Exponential, Graph, Ring
from hpcsgd.core.mixing import push_matrix, symmetric_matrix
from hpcsgd.core.replica_groups import Contribution
from hpcsgd.core.topology import Topology, form
from hpcsgd.elastic.contribution import Facts
from hpcsgd.methods import METHODS, Method, bsp, diloco, hierarchical, sgp
from hpcsgd.methods.registry import DELAYABLE
from hpcsgd.methods.selsync import gradients
from hpcsgd.parts import outer_schedules
from hpcsgd.parts.averagers import (
    AcrossShards,
    MedianNorm,
    OverSenders,
    PerBlock,
    PseudoGradientPenalty,
    RadialDirectional,
)
from hpcsgd.parts.grad_reduces import Quantized, ReduceScatter, Sparse
from hpcsgd.parts.quantizers import fp16, int4, int8
from hpcsgd.parts.schedules import DynamicLocalSteps
from hpcsgd.parts.sparsifiers import Deft, ExDyna
from local_methods import (
    NESTEROV,
    accumulating,
    adaptive,
    after_a_lazy_start,
    blended,
    carried,
    desynced,
    fed_averaging,
    gradients_of,
    guarding,
    in_turn,
    paired,
    selective,
    with_outer,
)
from methods.invariants import Invariant, every_update_counts_once, reads_within, the_mean_is_kept
from packing import Wires, by_blocks, half, packed
from radial import merging
from references import (
    MakeOptimizer,
    Synchronize,
    alone,
    big_batch,
    following,
    gossiped,
    local_sgd,
    model,
    pushed,
    synchronize_every,
)
from sparse_deltas import over_positions, per_run, sparse_synchronizations
from sparsifying import Exdyna, deft, sparsified

EVERY = 3
STEPS = 7
RATES = (1.0, 1.0, 0.8, 0.8, 0.5, 0.5, 0.2)
"""The learning rate factors of every training: methods that read the learning rate see it change."""
DECAYED = 3
"""The first step at a lower learning rate."""
DENSITY = 0.2

History = list[list[Tensor]]
"""The parameters as [step][group]."""


@dataclass(frozen=True)
class Case:
    """One way to construct a method, and the expected result on P × K ranks."""

    method: str
    arguments: Callable[[], Mapping[str, Any]]
    """Returns new arguments for each method: some arguments are methods or gradient reductions with state."""
    reference: Callable[[int, int, MakeOptimizer], History]
    """Returns the expected parameters after each of STEPS steps."""
    plain_sgd: bool = False
    """True if the method refuses all optimizers other than plain SGD."""
    same_bits: bool = True
    """True if two runs have the same bits; otherwise they differ by rounding."""
    form: Callable[[Communicator, int], Topology] = form
    invariants: tuple[Invariant, ...] = ()
    """Invariants that hold in addition to the reference."""
    still: Mapping[str, Any] | None = None
    """Arguments with which groups without further updates stay at the result of the outer step."""

    def new(self) -> Method:
        return METHODS[self.method](**self.arguments())

    def expected(self, P: int, K: int, make: MakeOptimizer) -> History:
        return self.reference(P, K, following(RATES, make))


@dataclass(frozen=True)
class Exempt:
    """One way to construct a method that has no reference."""

    method: str
    arguments: Callable[[], Mapping[str, Any]]
    reason: str
    invariants: tuple[Invariant, ...]
    """The invariants that are tested instead of a reference."""
    form: Callable[[Communicator, int], Topology] = form

    def new(self) -> Method:
        return METHODS[self.method](**self.arguments())


def uncovered(
    methods: Iterable[str], references: Mapping[str, Case], exceptions: Mapping[str, Exempt]
) -> list[str]:
    """Return the names of the methods that have no entry in either table."""
    covered = {entry.method for entry in [*references.values(), *exceptions.values()]}
    return sorted(set(methods) - covered)


def local(synchronize: Callable[[int], Synchronize]) -> Callable[[int, int, MakeOptimizer], History]:
    """Return the reference of groups that train alone and synchronize by `synchronize(P)`."""
    return lambda P, K, make: alone(P, K, make, STEPS, synchronize(P))


def synchronous(P: int, K: int, make: MakeOptimizer) -> History:
    return [[w] * P for w in big_batch(P * K, make, STEPS)]


def averaging(P: int, K: int, make: MakeOptimizer, together: int = 0) -> History:
    return local_sgd(P, K, EVERY, make, STEPS, together)


def accumulated(P: int, K: int, make: MakeOptimizer) -> History:
    lr = make(list(model().parameters())).param_groups[0]["lr"]
    return accumulating(P, EVERY, [lr * rate for rate in RATES], gradients_of(K))


def selected(by: str) -> Callable[[int, int, MakeOptimizer], History]:
    return lambda P, K, make: selective(P, K, 0.3, by, make, STEPS, window=4, smoothing=0.5)[0]


def pushing(
    graph: Graph, staleness: int = 0, together: int = 0
) -> Callable[[int, int, MakeOptimizer], History]:
    return lambda P, K, make: gossiped(P, K, graph, push_matrix, make, STEPS, staleness, together)


@dataclass(frozen=True)
class AllAlive:
    """Replica groups none of which ever fails; tests/elastic has tests with groups that do."""

    cross: Communicator

    @property
    def index(self) -> int:
        return self.cross.rank

    @property
    def count(self) -> int:
        return self.cross.size

    def require_alike(self, facts: Sequence[Fact]) -> None:
        require_alike(self.cross, facts)

    def mean(
        self, w: Sequence[Tensor], t: int, *, alike: bool = True, contribution: Contribution | None = None
    ) -> None:
        brought: Sequence[Tensor | None] = w
        if contribution is not None:
            norms, weights = (
                dict(enumerate(self.cross.gather_objects(each)))
                for each in (contribution.norms, contribution.weights)
            )
            brought = contribution(Facts(norms, weights, t, contribution.part))
        for x, mine in zip(w, brought, strict=True):
            if mine is None:
                continue
            mean = mine.clone()
            self.cross.allreduce(mean, "mean").wait()
            x.copy_(mean)

    def finish(self) -> None:
        """Do nothing: no group waits."""

    def close(self) -> None:
        """Do nothing: no group needs to be notified."""


def replica_groups(world: Communicator, P: int) -> Topology:
    """Return a topology in which every group is a job of its own, and the others are its replica groups."""
    topology = form(world, P)
    return replace(
        topology,
        inter_group=world.split(world.rank, 0),
        num_groups=1,
        replica_groups=AllAlive(topology.inter_group),
    )


def adam_outside(params: Sequence[Tensor]) -> optim.Optimizer:
    """Return Adam with a large ε, so that it does not amplify tiny differences such as rounding."""
    return optim.Adam(params, lr=0.1, eps=0.1)


APART = {"exp_avg": 4, "momentum_buffer": 4, "exp_avg_sq": 6, "max_exp_avg_sq": 6}
"""Synchronization intervals of optimizer state; those of the first moments are no multiple of EVERY."""
OUTER_SCHEDULE = outer_schedules.piecewise(8, lr=[[0.25, 0.2], [0.5, 1.0]], momentum=[[0.5, 0.5], [0.5, 0.9]])
OUTER_VALUES = {2: (0.2, 0.5), 3: (0.6, 0.5), 5: (1.0, 0.9), 6: (1.0, 0.9)}
"""The learning rate and momentum that `OUTER_SCHEDULE` gives, by step."""
ASYNC_OUTER_VALUES = {EVERY: (0.6, 0.5), 2 * EVERY: (1.0, 0.9)}
IN_FEW_BITS = Wires(half, by_blocks(8, 8), by_blocks(4, 16))
REFERENCES: Mapping[str, Case] = {
    "adacomm": Case(
        "adacomm",
        lambda: {"initial_sync_every": EVERY, "adapt_every": 2},
        local(lambda P: adaptive(EVERY, block=2, rates=RATES)),
        invariants=(the_mean_is_kept,),
    ),
    "allreduce_local_sgd": Case(
        "allreduce_local_sgd", lambda: {"sync_every": EVERY}, averaging, invariants=(the_mean_is_kept,)
    ),
    "async_diloco without staleness": Case(
        "async_diloco",
        lambda: {"sync_every": EVERY, "max_staleness": 0},
        local(lambda P: with_outer(EVERY, NESTEROV)),
        same_bits=False,
    ),
    "async_diloco without staleness, by an outer schedule": Case(
        "async_diloco",
        lambda: {"sync_every": EVERY, "max_staleness": 0, "outer_schedule": OUTER_SCHEDULE},
        local(lambda P: with_outer(EVERY, NESTEROV, ASYNC_OUTER_VALUES)),
        same_bits=False,
    ),
    "bsp": Case("bsp", dict, synchronous),
    "bsp by reduce-scatter": Case("bsp", lambda: {"grad_reduce": ReduceScatter()}, synchronous),
    "bsp in few bits": Case(
        "bsp",
        lambda: {"grad_reduce": Quantized(gradients=int8(block=8))},
        lambda P, K, make: packed(P, K, Wires(gradients=by_blocks(8, 8)), make, STEPS, None),
    ),
    "d_psgd": Case(
        "d_psgd",
        dict,
        lambda P, K, make: gossiped(P, K, Ring(), symmetric_matrix, make, STEPS),
        invariants=(the_mean_is_kept,),
    ),
    "delayed": Case(
        "delayed",
        lambda: {"method": hierarchical(EVERY), "sync_delay": 2},
        local(lambda P: in_turn(EVERY, 1, 2, carried)),
        invariants=(the_mean_is_kept,),
    ),
    "des_loc": Case(
        "des_loc",
        lambda: {"sync_every": EVERY, "first_every": 4, "second_every": 6},
        lambda P, K, make: desynced(P, K, EVERY, APART, make, STEPS),
        invariants=(the_mean_is_kept,),
    ),
    "diloco": Case("diloco", lambda: {"sync_every": EVERY}, local(lambda P: with_outer(EVERY, NESTEROV))),
    "diloco with Adam outside": Case(
        "diloco",
        lambda: {"sync_every": EVERY, "outer": adam_outside},
        local(lambda P: with_outer(EVERY, adam_outside)),
    ),
    "diloco with a guard": Case(
        "diloco",
        lambda: {"sync_every": 1, "guard": PseudoGradientPenalty(threshold=0.3, warm_up=2)},
        local(lambda P: guarding(1, 0.3, 2, make=NESTEROV)),
    ),
    "diloco, radial-directional": Case(
        "diloco",
        lambda: {"sync_every": EVERY, "merge": RadialDirectional()},
        local(lambda P: merging(EVERY, NESTEROV)),
    ),
    "diloco by an outer schedule": Case(
        "diloco",
        lambda: {"sync_every": EVERY, "outer_schedule": OUTER_SCHEDULE},
        local(lambda P: with_outer(EVERY, NESTEROV, OUTER_VALUES)),
    ),
    "ensemble_sync": Case("ensemble_sync", lambda: {"sync_every": EVERY}, averaging, form=replica_groups),
    "ensemble_sync with a guard": Case(
        "ensemble_sync",
        lambda: {"sync_every": 1, "guard": PseudoGradientPenalty(threshold=0.5, warm_up=2)},
        local(lambda P: guarding(1, 0.5, 2)),
        form=replica_groups,
    ),
    "ensemble_sync, fragments": Case(
        "ensemble_sync",
        lambda: {"sync_every": EVERY, "outer": NESTEROV, "num_fragments": 2},
        local(lambda P: in_turn(EVERY, 2, 0, blended(0.0), NESTEROV, fewest=1)),
        form=replica_groups,
    ),
    "ensemble_sync, fragments by tokens": Case(
        "ensemble_sync",
        lambda: {"sync_every": EVERY, "outer": NESTEROV, "num_fragments": 2, "tokens_per_step": 3.0},
        local(lambda P: in_turn(EVERY, 2, 0, blended(0.0), NESTEROV, fewest=1)),
        form=replica_groups,
    ),
    "ensemble_sync, radial-directional": Case(
        "ensemble_sync",
        lambda: {"sync_every": EVERY, "merge": RadialDirectional(), "outer": NESTEROV},
        local(lambda P: merging(EVERY, NESTEROV, fewest=1)),
        form=replica_groups,
    ),
    "fedavg": Case(
        "fedavg",
        lambda: {"fraction": 0.5, "per_epoch": 2, "steps_per_epoch": 5},
        local(lambda P: fed_averaging(P, 0.5, {3, 5, 8, 10}.__contains__)),
    ),
    "hierarchical": Case(
        "hierarchical", lambda: {"sync_every": EVERY}, averaging, invariants=(the_mean_is_kept,)
    ),
    "hierarchical by reduce-scatter": Case(
        "hierarchical", lambda: {"sync_every": EVERY, "grad_reduce": ReduceScatter()}, averaging
    ),
    "hierarchical with a guard": Case(
        "hierarchical",
        lambda: {"sync_every": 1, "guard": PseudoGradientPenalty(threshold=0.5, warm_up=2, max_norm=0.2)},
        local(lambda P: guarding(1, 0.5, 2, 0.2)),
    ),
    "hierarchical in few bits": Case(
        "hierarchical",
        lambda: {
            "sync_every": 2,
            "grad_reduce": Quantized(fp16(), int8(block=8)),
            "quantize": int4(block=16),
        },
        lambda P, K, make: packed(P, K, IN_FEW_BITS, make, STEPS, 2),
    ),
    "hierarchical with DEFT": Case(
        "hierarchical",
        lambda: {"sync_every": EVERY, "grad_reduce": Sparse(Deft(DENSITY))},
        lambda P, K, make: sparsified(P, K, deft(DENSITY), make, STEPS, synchronize_every(EVERY)),
    ),
    "hierarchical with ExDyna": Case(
        "hierarchical",
        lambda: {"sync_every": EVERY, "grad_reduce": Sparse(ExDyna(DENSITY))},
        lambda P, K, make: sparsified(P, K, Exdyna(DENSITY), make, STEPS, synchronize_every(EVERY)),
    ),
    "noloco": Case(
        "noloco",
        lambda: {"sync_every": EVERY, "seed": 3},
        local(lambda P: paired(EVERY, 0.5, 0.7, 0.75, seed=3)),
        invariants=(the_mean_is_kept,),
        still={"sync_every": 1, "alpha": 0.0, "beta": 0.1, "gamma": 0.5},
    ),
    "osgp": Case("osgp", lambda: {"overlap_steps": 2}, pushing(Exponential(), staleness=2)),
    "osgp on a ring": Case(
        "osgp", lambda: {"overlap_steps": 1, "graph": Ring()}, pushing(Ring(), staleness=1)
    ),
    "pier": Case(
        "pier",
        lambda: {"sync_every": 2, "total_steps": STEPS, "lazy_fraction": 0.6},
        lambda P, K, make: alone(
            P, K, make, STEPS, after_a_lazy_start(2, NESTEROV, 4, {6: (0.9, 0.9)}), together=4
        ),
    ),
    "pier with Adam outside": Case(
        "pier",
        lambda: {
            "sync_every": 2,
            "total_steps": STEPS,
            "lazy_fraction": 0.6,
            "outer": adam_outside,
            "outer_schedule": outer_schedules.piecewise(STEPS, lr=[[0, 0.05]]),
        },
        lambda P, K, make: alone(
            P, K, make, STEPS, after_a_lazy_start(2, adam_outside, 4, {6: (0.05, 0.0)}), together=4
        ),
    ),
    "post_local": Case(
        "post_local",
        lambda: {"sync_every": EVERY},
        lambda P, K, make: averaging(P, K, make, together=DECAYED),
    ),
    "sasgd": Case("sasgd", lambda: {"sync_every": EVERY}, accumulated, plain_sgd=True),
    "selsync": Case(
        "selsync",
        lambda: {"delta": 0.3, "window": 4, "smoothing": 0.5},
        selected("parameters"),
        invariants=(the_mean_is_kept,),
    ),
    "selsync by gradients": Case(
        "selsync",
        lambda: {"delta": 0.3, "aggregate": gradients, "window": 4, "smoothing": 0.5},
        selected("gradients"),
    ),
    "sgp": Case("sgp", dict, pushing(Exponential()), invariants=(the_mean_is_kept,)),
    "sparseloco": Case(
        "sparseloco",
        lambda: {"sync_every": EVERY, "density": DENSITY, "beta": 0.8, "lr": 0.75, "selection": PerBlock(16)},
        lambda P, K, make: alone(
            P, K, make, STEPS, sparse_synchronizations(EVERY, K, per_run(16, DENSITY, K), 2, 0.8, 0.75)
        ),
        still={"sync_every": 1, "density": 1.0, "bits": 32, "lr": 0.1, "beta": 0.0},
    ),
    "sparseloco over positions": Case(
        "sparseloco",
        lambda: {"sync_every": EVERY, "density": DENSITY, "bits": 4, "selection": AcrossShards(6)},
        lambda P, K, make: alone(
            P, K, make, STEPS, sparse_synchronizations(EVERY, K, over_positions(6, DENSITY, K), 4)
        ),
    ),
    "sparseloco over senders": Case(
        "sparseloco",
        lambda: {
            "sync_every": EVERY,
            "density": DENSITY,
            "lr": 0.65,
            "selection": PerBlock(16),
            "mean": OverSenders(),
            "clip": MedianNorm(),
        },
        lambda P, K, make: alone(
            P,
            K,
            make,
            STEPS,
            sparse_synchronizations(
                EVERY, K, per_run(16, DENSITY, K), lr=0.65, over_senders=True, clips=True
            ),
        ),
    ),
    "sparseloco by an outer schedule": Case(
        "sparseloco",
        lambda: {
            "sync_every": EVERY,
            "density": DENSITY,
            "bits": 8,
            "outer_schedule": outer_schedules.piecewise(8, lr=[[0.25, 0.2], [0.5, 1.0]]),
        },
        lambda P, K, make: alone(
            P,
            K,
            make,
            STEPS,
            sparse_synchronizations(EVERY, K, per_run(4096, DENSITY, K), 8, lr={3: 0.6, 6: 1.0}),
        ),
    ),
    "ssp without staleness": Case(
        "ssp",
        lambda: {"max_staleness": 0},
        lambda P, K, make: [[w] * P for w in pushed(P, K, make, STEPS)],
        same_bits=False,
        invariants=(every_update_counts_once, reads_within(0)),
    ),
    "streaming": Case(
        "streaming",
        lambda: {"method": diloco(EVERY), "num_fragments": 2, "sync_delay": 2},
        local(lambda P: in_turn(EVERY, 2, 2, blended(0.5), NESTEROV)),
    ),
    "streaming by an outer schedule": Case(
        "streaming",
        lambda: {
            "method": diloco(EVERY, outer_schedule=OUTER_SCHEDULE),
            "num_fragments": 2,
            "sync_delay": 2,
        },
        local(lambda P: in_turn(EVERY, 2, 2, blended(0.5), NESTEROV, OUTER_VALUES)),
    ),
    "switch from bsp to hierarchical": Case(
        "switch",
        lambda: {"first": bsp(), "then": hierarchical(EVERY), "at": 2},
        lambda P, K, make: averaging(P, K, make, together=2),
    ),
    "switch from bsp to sgp": Case(
        "switch", lambda: {"first": bsp(), "then": sgp(), "at": 5}, pushing(Exponential(), together=5)
    ),
}

OF_INTERVALS: Mapping[str, Callable[[int], Method]] = {
    name: METHODS[name]
    for name in sorted(DELAYABLE)
    if [p.name for p in signature(METHODS[name]).parameters.values() if p.default is p.empty]
    == ["sync_every"]
}
"""The methods that can be delayed and whose only required argument is their interval."""

WHO_IS_FAST = "which updates of others a group has seen depends on who is fast"
EXCEPTIONS: Mapping[str, Exempt] = {
    "ad_psgd": Exempt(
        "ad_psgd",
        dict,
        "when two groups average, and with what, depends on who is fast",
        (every_update_counts_once, the_mean_is_kept),
    ),
    "async_diloco": Exempt(
        "async_diloco",
        lambda: {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0},
        WHO_IS_FAST,
        (every_update_counts_once,),
    ),
    "async_diloco by speed": Exempt(
        "async_diloco",
        lambda: {
            "sync_every": 1,
            "outer_lr": 1.0,
            "outer_momentum": 0.0,
            "local_steps": DynamicLocalSteps(),
        },
        WHO_IS_FAST,
        (every_update_counts_once,),
    ),
    "async_sgd": Exempt("async_sgd", dict, WHO_IS_FAST, (every_update_counts_once,)),
    "heloco without corrections": Exempt(
        "heloco",
        lambda: {"sync_every": 2, "outer_lr": 1.0, "outer_momentum": 0.0, "keep_from": 0.0, "shrink": 0.0},
        WHO_IS_FAST,
        (every_update_counts_once,),
    ),
    "ssp": Exempt(
        "ssp", lambda: {"max_staleness": 2}, WHO_IS_FAST, (every_update_counts_once, reads_within(2))
    ),
    "ssp, nearly in step": Exempt("ssp", lambda: {"max_staleness": 1}, WHO_IS_FAST, (reads_within(1),)),
}
