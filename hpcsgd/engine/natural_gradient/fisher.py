"""The online estimate of a Fisher matrix, and the product of its inverse and a gradient.

D. Povey, X. Zhang, S. Khudanpur, "Parallel training of DNNs with Natural Gradient and Parameter Averaging",
https://arxiv.org/abs/1410.7455, the online version of NG-SGD. F_t follows the scatter S_t = Xᵀ X / N of
vectors that come in minibatches X [N, D]:

    F_t = R_tᵀ D_t R_t + ρ_t I              R_t [r, D] with orthonormal rows, r < D
    T_t = η S_t + (1 − η) F_t,  Y_t = R_t T_t
    Y_t Y_tᵀ = U C Uᵀ,  R_{t+1} = C^−½ Uᵀ Y_t,  D_{t+1} = C^½ − ρ_{t+1} I     one step of the power method
    (D − r) ρ_{t+1} = tr(T_t) − tr(C^½)                                      so that tr(F_{t+1}) = tr(T_t)
    G_t = F_t + α tr(F_t) / D · I,          η = 1 − exp(−N / N_S)

η is the weight of the new minibatch, and U C Uᵀ is an eigendecomposition. r, α and N_S are the options
`rank`, `alpha` and `history` of `NaturalGradient`. Differences from the paper:

- R_{t+1} is made orthonormal by QR every time, not only where the condition of C demands it.
- All floors are relative to F itself; the paper's ρ ≥ 1e-10 would be large for derivatives of a mean loss.
- The paper multiplies the rows of X, and of the derivatives Y, by the inverses, and keeps the norm of each.
  The finished gradient is Yᵀ X, so multiplying it from both sides is the same up to a factor. Here the norm
  of the finished gradient is kept.

The host decomposes the r × r matrix Y_t Y_tᵀ. So an update of vectors on a device begins on the device, and
finishes once the host has received that matrix, perhaps much later. Until then, host and device do not wait
for each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpcsgd.comm.on_host import Arrivals, on_device

linalg: Any = torch.linalg
"""torch.linalg, for which torch has no types."""

DELTA = 5e-4
"""The least eigenvalue of a Fisher estimate F, as a share of its largest."""

FIRST = 4
"""Number of power-method steps that compute the first estimate F_0 from the first minibatch."""


def largest(X: Tensor) -> Tensor:
    """Return the largest absolute value, or NaN if any element is NaN."""
    low, high = torch.aminmax(X)  # 25 times as fast as the infinity norm
    return torch.maximum(-low, high)


@dataclass(frozen=True, slots=True)
class Fisher:
    """A Fisher estimate F = Rᵀ diag(eigenvalues − ρ) R + ρ I, which is never changed in place."""

    R: Tensor
    """[r, D], orthonormal rows."""
    eigenvalues: Tensor
    """[r], the eigenvalues of F along the rows of R, the paper's D_t + ρ_t I; float64 on the CPU."""
    rho: float
    """ρ, the eigenvalue of F in all directions orthogonal to the rows of R."""

    @classmethod
    def of(cls, X: Tensor, rank: int) -> Fisher | None:
        """Return F_0 from the first minibatch X [N, D], with r = min(rank, D − 1); None if X = 0 or D = 1.

        D − 1 directions, and ρ for the remaining one, describe a full matrix.
        """
        D = X.shape[1]
        r = min(rank, D - 1)
        if r < 1:
            return None
        start = torch.randn(
            D, r, generator=torch.Generator("cpu").manual_seed(D), dtype=torch.float64, device="cpu"
        )
        found = cls(linalg.qr(start).Q.T.to(X), torch.zeros(r, dtype=torch.float64, device="cpu"), 0.0)
        for _ in range(FIRST):
            found = found.updated(X, 1.0)
        return found if found.trace > 0 else None

    @property
    def trace(self) -> float:
        r, D = self.R.shape
        return self.eigenvalues.sum().item() + (D - r) * self.rho

    def updated(self, X: Tensor, eta: float) -> Fisher:
        """Return F_{t+1} from this F_t and the minibatch X [N, D]; F_t if X is zero or not finite.

        `eta` is η, the weight of the minibatch. The host waits for the device.
        """
        return self.begun(X, eta, Arrivals()).finished()

    def begun(self, X: Tensor, eta: float, pending: Arrivals) -> Update:
        """Begin to compute F_{t+1} from this F_t and the minibatch X [N, D]; do not wait for the device.

        `eta` is η, the weight of the minibatch. `pending` copies to the host what the device computes. The
        method `finished` of the result waits for this copy and returns F_{t+1}.
        """
        N, R = len(X), self.R
        s = largest(X)
        scaled = X / s  # nothing below under- or overflows, whatever the size of derivatives
        size = s.double()
        a = eta * size * size / N
        trace = a * scaled.square().sum().double() + (1 - eta) * self.trace
        # From here on, all is divided by tr(T): Y = R T / tr(T).
        Y = (a / trace) * ((scaled @ R.T).T @ scaled).double()
        Y.add_((torch.full_like(trace, 1 - eta) / trace * on_device(self.eigenvalues, R.device))[:, None] * R)
        return Update(self, Y, pending.bring(torch.cat([size[None], trace[None], (Y @ Y.T).view(-1)])))

    def is_finite(self) -> bool:
        """Return whether all eigenvalues of F are finite.

        R is then finite, too, because Y Yᵀ of a Y that is not finite has no eigenvalues.
        """
        return math.isfinite(self.trace)

    def shrinkage(self, alpha: float) -> Shrinkage:
        """Return β G⁻¹ = I − Rᵀ E R for G = F + α tr(F) / D · I, by the Woodbury identity.

        The factor β is ρ + α tr(F) / D.
        """
        smoothed = self.eigenvalues + alpha * self.trace / self.R.shape[1]
        E = ((self.eigenvalues - self.rho) / smoothed).to(self.R.dtype)
        return Shrinkage(self.R, on_device(E, self.R.device))


@dataclass(frozen=True, slots=True)
class Update:
    """An update that has begun, from the Fisher estimate F_t to F_{t+1} by a minibatch X."""

    F: Fisher
    Y: Tensor
    """[r, D], the matrix Y_t divided by tr(T_t)."""
    seen: Callable[[], Tensor]
    """Waits for the device, and returns one vector: the largest |X|, tr(T_t), and Y Yᵀ."""

    def is_of_numbers(self) -> bool:
        """Wait for the device, and return whether all of X is finite."""
        return math.isfinite(self.seen()[0].item())

    def finished(self) -> Fisher:
        """Wait for the device, and return F_{t+1}, or F_t if X is zero or not finite."""
        Y, (r, D) = self.Y, self.F.R.shape
        trace = self.seen()[1].item()
        if not 0 < trace < math.inf:
            return self.F
        C, U = linalg.eigh(self.seen()[2:].view(r, r))
        eigenvalues: Tensor = trace * C.flip(0).clamp_min(0).sqrt()
        rows = on_device(U.flip(1), Y.device).T @ Y
        Q: Tensor = linalg.qr(rows.T.to(self.F.R)).Q
        least = DELTA * eigenvalues[0].item()
        rho = max((trace - eigenvalues.sum().item()) / (D - r), least)
        return Fisher(Q.T.contiguous(), eigenvalues.clamp_min(least), rho)


@dataclass(frozen=True, slots=True)
class Shrinkage:
    """The matrix I − Rᵀ E R, with which a gradient is multiplied: β G⁻¹ of `Fisher.shrinkage`."""

    R: Tensor
    """[r, D]"""
    E: Tensor
    """[r], the diagonal of E."""


def natural(G: Tensor, left: Shrinkage | None, right: Shrinkage | None) -> Tensor | None:
    """Return γ · (I − R_lᵀ E_l R_l) G (I − R_rᵀ E_r R_r) for a gradient G [D_l, D_r].

    R_l and E_l are of `left`, R_r and E_r of `right`; None stands for the identity matrix. γ is such that the
    norm ‖G‖_F is kept. If γ is not finite, the result is G. If both matrices are None, the result is None.
    """
    U: list[Tensor] = []  # what is subtracted from G is U V
    V: list[Tensor] = []
    if right is not None:
        U.append((G @ right.R.T) * right.E)
        V.append(right.R)
    if left is not None:
        rows = left.R @ G
        U.append(left.R.T * left.E)
        V.append(
            rows if right is None else torch.addmm(rows, (rows @ right.R.T) * right.E, right.R, alpha=-1)
        )
    if not U:
        return None
    found = torch.addmm(G, torch.cat(U, 1), torch.cat(V), alpha=-1)
    scale: Tensor = linalg.vector_norm(G) / linalg.vector_norm(found)
    return torch.where(scale.isfinite(), found.mul_(scale), G.to(found.dtype), out=found)
