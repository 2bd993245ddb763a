"""An outer optimizer among groups that may die, which average one fragment of the model after the other.

Streaming DiLoCo (arXiv:2501.18512) and Decoupled DiLoCo (arXiv:2604.21428) synchronize F fragments in turn.
Every group keeps θ and the state of an outer optimizer for each fragment p. Its own synchronization is

    W_p ← the mean of the fragment in the models of the groups in the membership
    θ_p ← OuterOpt_p(θ_p, θ_p − W_p), if the fragment has changed in one of their models
    W_i,p ← θ_p                        for every group i

In the other fragments, group i keeps the changes that it has made since their last synchronizations. It keeps
them, too, if others were left out or return meanwhile. When a group returns, all get θ and the state of all
fragments from one that has missed no round, whichever fragment is synchronized then. For each other fragment
p in which θ_p, the new one, is not θ_i,p, the old one, as where the others have synchronized it without
group i:

    W_i,p ← θ_p − (θ_i,p − W_i,p)      if group i counts in this round
    W_i,p ← θ_p                        otherwise

In the mean, groups may be weighted by their steps and tokens since they last received the fragment, as in
`token_weights`. A group receives it when it is synchronized, or when the group returns and loses its change.

A synchronization at which groups evaluate or save the model has all fragments. So has one outside the turn,
such as the first one and that at the end of an epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hpcsgd.core.norm import squared_norm, sum_on_host
from hpcsgd.core.state import State
from hpcsgd.core.step import StepContext
from hpcsgd.core.traffic import BucketLayout, CommOp, ModelLayout, allreduce
from hpcsgd.errors import UserError
from hpcsgd.parts.averagers.elastic_mean import average_with_buffers, rebased
from hpcsgd.parts.averagers.fragment_contribution import FragmentsContribution
from hpcsgd.parts.averagers.fragments import Fragment, fragments, put_together
from hpcsgd.parts.averagers.outer_elastic_mean import MeanFrom, facts_op
from hpcsgd.parts.averagers.outer_step import MakeOptimizer, OuterStep
from hpcsgd.parts.averagers.radial_directional_elastic import RadialDirectionalElasticMean
from hpcsgd.parts.averagers.token_weights import TokenWeights
from hpcsgd.parts.outer_schedules.base import OuterSchedule


class Turn(Protocol):
    """A schedule by which F fragments synchronize one after the other."""

    @property
    def F(self) -> int: ...

    def at(self, t: int) -> Sequence[int]:
        """Return the indices of the fragments that synchronize after update `t`."""
        ...


class OuterElasticFragments:
    """The averager `inner`, followed by an outer step, for the fragments that `turn` lists.

    The step is that of `OuterStep(make_optimizer, schedule)`, with a state of its own for each fragment. In
    the mean, groups have the weights of `TokenWeights(tokens_per_step)`. The metric `distance` covers all
    fragments, each as of its last synchronization. A fragment that this group has not synchronized yet counts
    0.
    """

    def __init__(
        self,
        inner: MeanFrom | RadialDirectionalElasticMean,
        make_optimizer: MakeOptimizer,
        schedule: OuterSchedule | None,
        turn: Turn,
        tokens_per_step: float | None = None,
    ) -> None:
        self.inner, self.turn = inner, turn
        self.traits = replace(inner.traits, own_settings=("tokens_per_step",))
        self.tokens_per_step, self._weights = tokens_per_step, TokenWeights(tokens_per_step, turn.F)
        self.outers = [OuterStep(make_optimizer, schedule) for _ in range(turn.F)]
        self.make_optimizer, self.schedule = self.outers[0].make_optimizer, schedule
        self.outers[0].require_shareable()
        self._cut: list[Fragment] = []
        self._whole: list[Tensor] = []
        self._saved = State()
        self._squared = [0.0] * turn.F
        """For each fragment, D² at its last synchronization; 0 before the first one."""
        self._updated = False
        """True if there was an update since the last synchronization."""

    def prepare(self, vectors: Sequence[Tensor], s: StepContext) -> None:
        self._start(s)
        if s.in_step:
            self._updated = True
            self._weights.count_step()

    def average(self, vectors: Iterable[Tensor], s: StepContext) -> list[Tensor]:
        found = list(vectors)
        models = [fragment.of(self._whole) for fragment in self._cut]
        old = [
            [x.to(w.dtype, copy=True) for x, w in zip(outer.theta, mine, strict=True)]
            for outer, mine in zip(self.outers, models, strict=True)
        ]
        added = self._averaged(models, old, s)
        for p, outer in enumerate(self.outers):
            outer.adopt(added.shared_of(p))
        changed = changed_fragments(old, [outer.theta for outer in self.outers], s)
        for p, outer in enumerate(self.outers):
            new = [x.to(w.dtype, copy=True) for x, w in zip(outer.theta, models[p], strict=True)]
            if added.averages(p):
                self._step(p, added, new, s)
                self._weights.received(p)
                new = outer.theta
            elif not changed[p]:
                continue
            elif added.counts:
                new = rebased(models[p], old[p], new)
            else:
                self._weights.received(p)
            for mine, x in self._cut[p].parts(self._whole, new):
                mine.copy_(x)
        s.metrics["distance"] = sum(self._squared) ** 0.5
        return found

    def memory_bytes(self, m: ModelLayout) -> float:
        return self.outers[0].tensors * m.own_elements(wide=True) * (1 if m.sharded else m.K)

    def comm_ops(self, m: ModelLayout) -> Iterator[CommOp]:
        """Yield the operations of a synchronization of one fragment, as a mean over the fragments."""
        F = self.turn.F
        yield from self.inner.norm_ops(m, F)
        yield facts_op(m, F + len(self._weights.own))
        for p in range(F):
            counts = [(b.used * (p + 1) // F - b.used * p // F, b.width) for b in m.buckets]
            part = replace(m, buckets=tuple(BucketLayout(n, n, width) for n, width in counts))
            for x in self.inner.part_ops(part):
                yield replace(x, times=x.times / F)
        if m.sharded:
            yield allreduce("intra_group", 4 * F)  # which fragments have changed, as 32-bit integers

    def state_dict(self) -> State:
        if not self._cut:
            return self._saved
        states = [outer.state_dict() for outer in self.outers]
        names = dict.fromkeys(name for state in states for name in state.sharded)
        vectors: dict[str, list[Tensor]] = {}
        for name in names:
            having = zip(self._cut, states, strict=True)
            pieces = [(cut, state.sharded[name]) for cut, state in having if name in state.sharded]
            vectors[name] = put_together(self._whole, pieces)
        rests = [state.replicated["rest"] for state in states]
        names_of = [list(state.sharded) for state in states]
        replicated = {"rest": rests[0], "rests": rests, "names": names_of, **self._weights.state()}
        return State(replicated=replicated, sharded=vectors)

    def load_state_dict(self, state: State) -> None:
        """Store `state`; the next step or synchronization loads it into θ and the outer optimizers."""
        self._saved, self._cut = state, []
        self._weights.load(state.replicated)

    def _start(self, s: StepContext) -> None:
        if self._cut:
            return
        tensors = sum(len(b.slots) for b in s.buckets)
        if tensors < self.turn.F:
            why = f"num_fragments = {self.turn.F}: expected at most {tensors}, the model's trainable tensors"
            raise UserError(why, key="num_fragments", value=self.turn.F)
        self._whole = [b.parameters for b in s.buckets]
        self._cut = fragments(s.buckets, self.turn.F, whole=True)
        saved, self._saved = self._saved, State()
        for p, (outer, fragment) in enumerate(zip(self.outers, self._cut, strict=True)):
            outer.load_state_dict(_of_fragment(saved, p, self._cut, self._whole))
            outer.start(fragment.of(self._whole))

    def _averaged(
        self, models: list[list[Tensor]], old: list[list[Tensor]], s: StepContext
    ) -> FragmentsContribution:
        """Average the fragments on which the groups agree; return what this group has added. Collective."""
        due = self.turn.at(s.t) if self._updated else []
        self._updated = False
        parts = self.inner.fragment_parts([cut.cuts for cut in self._cut], models, old, s)
        shared = [outer.shared() for outer in self.outers]
        index = s.topology.replica_groups.index
        added = FragmentsContribution(
            index, parts, old, shared, self.inner.quorum, next(iter(due), None), self._weights.own
        )

        def average(w: list[Tensor]) -> None:
            added.buffers = w[len(s.buckets) :]
            s.topology.replica_groups.mean(added.tensors, s.t, alike=not s.sharded, contribution=added)

        average_with_buffers(s, average)
        return added

    def _step(self, p: int, added: FragmentsContribution, theta: list[Tensor], s: StepContext) -> None:
        """Take the outer step of fragment `p`, whose θ was `theta`; measure how far this group was off."""
        outer, mean = self.outers[p], added.parts[p].merged(theta, s)
        both = zip(self._cut[p].of(self._whole), mean, strict=True)
        squared = sum_on_host(squared_norm(w - x) for w, x in both)
        if s.sharded:
            s.topology.intra_group.allreduce(squared).wait()
        self._squared[p] = squared.item()
        if added.moved[p]:
            s.metrics |= outer.set_values(added.t, added.moved[p])
            outer.step(mean)


def changed_fragments(
    old: Sequence[Sequence[Tensor]], theta: Sequence[Sequence[Tensor]], s: StepContext
) -> list[bool]:
    """Return for each fragment whether its θ, which was `old`, has changed; collective in the group.

    The answer is the same on all ranks of the group, even if θ changed only in the parts of some of them.
    Groups of other hardware may have another θ in the last bits.
    """
    pairs = (zip(before, after, strict=True) for before, after in zip(old, theta, strict=True))
    changed = [any(not x.equal(y.to(x.dtype)) for x, y in of_fragment) for of_fragment in pairs]
    if not s.sharded:
        return changed
    on_any_rank = torch.tensor(changed, dtype=torch.int32, device="cpu")
    s.topology.intra_group.allreduce(on_any_rank, "max").wait()
    return [bool(x) for x in on_any_rank.tolist()]


def _of_fragment(saved: State, p: int, cut: Sequence[Fragment], whole: Sequence[Tensor]) -> State:
    """Return the state of fragment `p` in `saved`, which may have another number of fragments."""
    if "rest" not in saved.replicated:  # it was saved before the first step
        return State()
    same, F = saved.replicated, len(cut)
    names = same.get("names", [list(saved.sharded)])  # without it, the state is that of the whole model
    rests = same.get("rests", [same["rest"]])
    if len(rests) != F:
        fewest = min(range(len(names)), key=lambda q: len(names[q]))
        rests, names = [rests[fewest]] * F, [names[fewest]] * F
    vectors = {
        name: cut[p].of([x[: w.numel()] for x, w in zip(saved.sharded[name], whole, strict=True)])
        for name in names[p]
    }
    return State(replicated={"rest": rests[p]}, sharded=vectors)
