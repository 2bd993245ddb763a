"""A small neural operator, with complex parameters or with the same numbers as pairs of real numbers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import local_methods
import packing
import radial
import references
import sparse_deltas
import sparsifying
from methods import table


class Operator(nn.Module):
    """A real FFT, complex linear maps, and a real result.

    Args:
        pairs: True stores complex parameters as real ones with one more dimension of size 2. The computation
            is the same.
        mixed: True adds real parameters, and complex ones of odd sizes, of one number, and transposed in
            memory. False makes flat vectors for any K the same with and without `pairs`.
    """

    def __init__(
        self, *, pairs: bool, mixed: bool = True, dtype: torch.dtype = torch.float64, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.head = nn.Linear(3, 3).to(dtype) if mixed else None

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=dtype, device="cpu") / 2

        self.lift: nn.Parameter
        self.bias: nn.Parameter
        hidden = 5 if mixed else 6
        values = {"lift": drawn(3, hidden, 2), "bias": drawn(hidden, 2), "spectral": drawn(hidden, 3, 2)}
        if mixed:
            values["spectral"] = drawn(3, hidden, 2).transpose(0, 1)
            values["shift"] = drawn(2)
        for name, value in values.items():
            param = nn.Parameter(value if pairs else torch.view_as_complex(value))
            param.dimensions = value.dim() - 1  # type: ignore[attr-defined] - those of the complex numbers
            setattr(self, name, param)
        with torch.no_grad():
            for p in [] if self.head is None else self.head.parameters():
                p.copy_(drawn(*p.shape))

    def numbers(self, name: str) -> Tensor:
        """Return a parameter as complex numbers."""
        param: Tensor = getattr(self, name)
        return param if param.is_complex() else torch.view_as_complex(param)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor [batch, 3] for `x` [batch, 5]."""
        z = torch.fft.rfft(x, norm="ortho") @ self.numbers("lift") + self.numbers("bias")
        z = torch.complex(z.real.tanh(), z.imag.tanh()) @ self.numbers("spectral")
        if self.head is None:
            return z.real + z.imag
        z = z + self.numbers("shift").conj()  # so that its gradient may be a lazily conjugated tensor
        return self.head(z.real) + z.imag


def as_references(monkeypatch, *, mixed: bool = True) -> None:
    """Make the references of tests/ train pairs of real numbers, with the same number of parameters.

    The distributed training can then train complex parameters; see `as_trained`.
    """

    def twin(seed: int = 0) -> Operator:
        return Operator(pairs=True, mixed=mixed, seed=seed)

    for module in (local_methods, packing, radial, references, sparse_deltas, sparsifying, table):
        monkeypatch.setattr(module, "model", twin)


def as_trained(monkeypatch, *, mixed: bool = True) -> None:
    """Make `references.distributed` train complex parameters."""
    monkeypatch.setattr(references, "model", lambda seed=0: Operator(pairs=False, mixed=mixed, seed=seed))
