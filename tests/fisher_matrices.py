"""The full Fisher matrix that an estimate represents."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcsgd.engine.natural_gradient.fisher import Fisher


def dense(F: Fisher) -> Tensor:
    D = F.R.shape[1]
    R = F.R.double()
    return R.T @ (F.eigenvalues - F.rho).diag() @ R + F.rho * torch.eye(D, dtype=torch.float64)
