"""torch's Muon for an FSDP model, of whose matrices each rank of a group holds some rows.

The momentum needs no other rank's rows. For the orthogonalization each matrix has one owner among the K
ranks. An all-to-all sends the rows of every matrix to its owner, which orthogonalizes the whole matrix. A
second all-to-all sends the result's rows back. Muon orthogonalizes in bfloat16, so rows are sent in bfloat16
without a loss.

With a `period` P above 1 (A. Khaled et al.: MuonBP: Faster Muon via Block-Periodic Orthogonalization,
https://arxiv.org/abs/2510.16981), only every P-th step does that. In the other steps each rank
orthogonalizes its own rows as a matrix of their shape, and sends nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim

from hpcsgd import torch_private
from hpcsgd.comm import Communicator
from hpcsgd.comm.stats import phase
from hpcsgd.core.flat import Bucket
from hpcsgd.core.fsdp import is_fsdp
from hpcsgd.core.matrices import owners, rows_by_rank
from hpcsgd.engine.chained import parts_of
from hpcsgd.engine.in_parts import MUON
from hpcsgd.engine.optimizer_param import OptimizerParam

linalg: Any = torch.linalg
"""torch.linalg, for which torch has no types."""
PERIOD = "period"
"""The option of a parameter group: every how many steps its matrices are orthogonalized whole. Default 1."""
STEPS = "steps"
"""The number of steps so far, in a parameter group with a `period`."""
PHASE = "muon"
"""The phase of the messages in `CommStats`."""
MOMENTUM = "momentum_buffer"
"""The name that torch's Muon gives to its only state tensor."""
RATIOS: Mapping[str | None, Callable[[int, int], float]] = {
    None: lambda m, n: math.sqrt(max(1.0, m / n)),
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}
"""By torch's `adjust_lr_fn`: the factor of the learning rate for a matrix of m × n."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix that the ranks of a group hold by rows."""

    param: nn.Parameter
    options: Mapping[str, Any]
    """The parameter group."""
    owner: int
    """The rank that orthogonalizes the whole matrix."""
    rows: Sequence[int]
    """The number of rows of each rank."""

    def numel(self, j: int) -> int:
        """Return the number of elements on rank `j`."""
        return self.rows[j] * self.param.shape[1]


class MuonByRows:
    """The `step()` of an optimizer that is torch's Muon, or has it as a part, for an FSDP model."""

    def __init__(
        self, optimizer: optim.Optimizer, params: Sequence[nn.Parameter], group: Communicator
    ) -> None:
        """Prepare for `params`, all of the model's matrices in Muon, in an order that all ranks share."""
        self._optimizer, self._group = optimizer, group
        self._muons = [part for part in parts_of(optimizer) if type(part) in MUON]
        self._options = [options for part in self._muons for options in part.param_groups]
        options_of = {param: options for options in self._options for param in options["params"]}
        found = owners([param.shape for param in params], group.size)
        self._matrices = [
            Matrix(param, options_of[param], owner, rows_by_rank(param.shape, group.size))
            for param, owner in zip(params, found, strict=True)
        ]

    @torch.no_grad()
    def step(self, held: Iterable[OptimizerParam]) -> None:
        """Update the tensors of `held` from their gradients; collective over the group."""
        if "step" in vars(self._optimizer):
            torch_private.count_step(self._optimizer)
        here = {each.param: each.tensor for each in held}
        for part in parts_of(self._optimizer):
            if all(part is not muon for muon in self._muons):
                part.step()
        self._update(here)

    def others(self, by_group: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return the tensors `by_group`, with an empty list for each parameter group that Muon updates."""
        groups = zip(self._optimizer.param_groups, by_group, strict=True)
        return [[] if any(options is own for own in self._options) else own for options, own in groups]

    def complete(self, held: Iterable[OptimizerParam]) -> None:
        """Set the state of matrices that have none to that of a new Muon."""
        known = {matrix.param for matrix in self._matrices}
        for each in held:
            if each.param in known:
                self._momentum(each.tensor)

    def _update(self, here: Mapping[nn.Parameter, Tensor]) -> None:
        directions = {
            matrix: direction
            for matrix in self._matrices
            if (x := here.get(matrix.param)) is not None
            and (direction := self._direction(x, matrix)) is not None
        }
        whole = [matrix for matrix in self._matrices if _is_whole_step(matrix.options)]
        results = self._orthogonalized(whole, directions)
        for matrix, direction in directions.items():
            shape = torch.Size((matrix.rows[self._group.rank], matrix.param.shape[1]))
            if _is_whole_step(matrix.options):
                result, shape = results[matrix], matrix.param.shape
            else:
                result = newton_schulz(direction.view(shape), matrix.options)
            _apply(here[matrix.param], result, shape, matrix.options)
        for options in self._options:
            if PERIOD in options:
                options[STEPS] = options.get(STEPS, 0) + 1

    def _direction(self, x: Tensor, matrix: Matrix) -> Tensor | None:
        """Update the momentum of `x`; return what is to be orthogonalized, None without a gradient."""
        if (g := x.grad) is None:
            return None
        m = self._momentum(x)
        m.lerp_(g, 1 - matrix.options["momentum"])
        return (g.lerp(m, matrix.options["momentum"]) if matrix.options["nesterov"] else m).bfloat16()

    def _momentum(self, x: Tensor) -> Tensor:
        state = self._optimizer.state[x]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(x, requires_grad=False)
        return state[MOMENTUM]

    def _orthogonalized(
        self, matrices: Sequence[Matrix], directions: Mapping[Matrix, Tensor]
    ) -> dict[Matrix, Tensor]:
        """Return this rank's rows of each whole matrix, orthogonalized, as a vector; collective."""
        found: dict[Matrix, Tensor] = {}
        for device in dict.fromkeys(matrix.param.device for matrix in matrices):
            some = [matrix for matrix in matrices if matrix.param.device == device]
            found |= self._on_device(device, some, directions)
        return found

    def _on_device(
        self, device: torch.device, matrices: Sequence[Matrix], directions: Mapping[Matrix, Tensor]
    ) -> dict[Matrix, Tensor]:
        ranks, j = range(self._group.size), self._group.rank
        by_owner = [[matrix for matrix in matrices if matrix.owner == i] for i in ranks]
        mine = by_owner[j]

        def rows(matrix: Matrix) -> Tensor:
            # Every rank sends all of its rows, so that no rank waits for a gradient that another one lacks.
            known = directions.get(matrix)
            return (
                torch.zeros(matrix.numel(j), dtype=torch.bfloat16, device=device) if known is None else known
            )

        there = self._alltoall(
            [[rows(matrix) for matrix in theirs] for theirs in by_owner],
            [[matrix.numel(i) for matrix in mine] for i in ranks],
            device,
        )
        results: list[Sequence[Tensor]] = []
        for k, matrix in enumerate(mine):
            whole = torch.cat([there[i][k] for i in ranks]).view(matrix.param.shape)
            result = newton_schulz(whole, matrix.options).reshape(-1)
            results.append(torch.split(result, [matrix.numel(i) for i in ranks]))
        back = self._alltoall(
            [[parts[i] for parts in results] for i in ranks],
            [[matrix.numel(j) for matrix in theirs] for theirs in by_owner],
            device,
        )
        return {matrix: x for i in ranks for matrix, x in zip(by_owner[i], back[i], strict=True)}

    def _alltoall(
        self, send: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], device: torch.device
    ) -> list[Sequence[Tensor]]:
        """Send the vectors `send[i]` to rank i; return those received from each, whose lengths are `sizes`.

        The vectors differ in length, and some are empty, so they are sent as messages and not by an
        all-to-all of MPI.
        """
        j = self._group.rank
        empty = torch.zeros(0, dtype=torch.bfloat16, device=device)
        outgoing = {i: torch.cat([empty, *xs]) for i, xs in enumerate(send) if i != j}
        incoming = {
            i: torch.empty(sum(each), dtype=torch.bfloat16, device=device)
            for i, each in enumerate(sizes)
            if i != j and sum(each)
        }
        if outgoing:
            with phase(PHASE):
                outgoing = {i: x for i, x in outgoing.items() if x.numel()}
                self._group.sendrecv(outgoing, incoming).wait()
        received = {**incoming, j: torch.cat([empty, *send[j]])}
        vectors = [received.get(i, empty) for i in range(self._group.size)]
        return [torch.split(x, list(each)) if each else () for x, each in zip(vectors, sizes, strict=True)]


def muon_by_rows(
    optimizer: optim.Optimizer, buckets: Iterable[Bucket], group: Communicator
) -> MuonByRows | None:
    """Return what runs `optimizer` if Muon is to train matrices that torch has sharded, else None."""
    theirs = periods(optimizer)
    found = [slot.param for bucket in buckets for slot in bucket.slots if slot.param in theirs]
    return MuonByRows(optimizer, found, group) if found and is_fsdp(found[0]) else None


def periods(optimizer: optim.Optimizer) -> dict[nn.Parameter, int]:
    """Return the trainable parameters of torch's Muon in `optimizer`, with the period of each."""
    muons = (part for part in parts_of(optimizer) if type(part) in MUON)
    options = (options for part in muons for options in part.param_groups)
    return {p: each.get(PERIOD, 1) for each in options for p in each["params"] if p.requires_grad}


def newton_schulz(x: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return the matrix `x` of bfloat16 orthogonalized, in the operations of torch's Muon.

    `options`: a parameter group of Muon, with `ns_coefficients`, `ns_steps` and `eps`.
    """
    a, b, c = options["ns_coefficients"]
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    norm: Tensor = linalg.vector_norm(x)
    eps: float = options["eps"]
    x = torch.div(x, norm.clamp(min=eps))
    for _ in range(options["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _is_whole_step(options: Mapping[str, Any]) -> bool:
    return options.get(STEPS, 0) % options.get(PERIOD, 1) == 0


def _apply(x: Tensor, result: Tensor, shape: torch.Size, options: Mapping[str, Any]) -> None:
    """Update `x`, this rank's rows, by the same rows, `result`, of an orthogonalized matrix of `shape`."""
    lr = float(options["lr"])
    x.mul_(1 - lr * options["weight_decay"])
    x.add_(result.reshape(-1), alpha=-lr * RATIOS[options["adjust_lr_fn"]](*shape))
