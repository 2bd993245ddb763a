"""Check that the installed hpcsgd trains, and that its native kernels give the same bits as the reference.

`python -P with_torch.py NVCC`: if NVCC is not empty, the CUDA library has to load, even without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import sys
import sysconfig
from pathlib import Path

import torch

import hpcsgd
from hpcsgd import kernels
from hpcsgd.kernels import reference

SEGMENTS = torch.tensor([0, 1_000, 1_000, 400_000, 1_000_000])
K = torch.tensor([10, 0, 4_000, 6_000])


def installed() -> None:
    where = Path(hpcsgd.__file__ or "")
    assert where.is_relative_to(sysconfig.get_path("purelib")), f"{where} is not the installed one"
    for name in hpcsgd.__all__:
        getattr(hpcsgd, name)


def selecting() -> None:
    library = kernels.native()
    assert library, "no native kernels in the wheel"
    torch.manual_seed(1)
    x = torch.randn(1_000_000)
    x[::7] = x[0]  # ties
    x[123_456], x[7], x[400_007] = torch.nan, torch.inf, -torch.inf
    starts, stops = SEGMENTS[:-1], SEGMENTS[1:]
    chosen = kernels.largest(x, starts, stops, K)
    assert torch.equal(chosen, reference.largest(x, starts, stops, K))
    assert torch.equal(kernels.above(x, 2.5), reference.above(x, 2.5))
    code = kernels.encode(chosen)
    assert torch.equal(code, reference.encode(chosen))
    assert torch.equal(kernels.decode(code, len(chosen)), chosen)
    code = kernels.encode_chosen(chosen, starts, stops, K)
    assert torch.equal(kernels.decode_chosen(code, starts, stops, K), chosen)
    print(f"{library}: selects as the reference")


def accumulating() -> None:
    acc, g = torch.randn(1_000_000), torch.randn(1_000_000).bfloat16()
    other, g_other = acc.clone(), g.clone()
    norms, others = kernels.accumulate(acc, g, SEGMENTS), reference.accumulate(other, g_other, SEGMENTS)
    assert torch.equal(acc, other)
    assert not g.any()
    torch.testing.assert_close(norms, others, rtol=1e-12, atol=0)


def packing() -> None:
    x = torch.randn(1_000_001)
    for bits, draw in ((8, None), (4, 77), (2, None)):
        code = torch.empty(kernels.packed_bytes(len(x), 64, bits), dtype=torch.uint8)
        like, out, expected = torch.empty_like(code), torch.empty_like(x), torch.empty_like(x)
        kernels.pack(x, code, 64, bits, draw)
        reference.pack(x, like, 64, bits, draw)
        assert torch.equal(code, like), f"{bits} bits"
        kernels.unpack(code, out, 64, bits)
        reference.unpack(code, expected, 64, bits)
        assert torch.equal(out, expected), f"{bits} bits"


def training() -> None:
    """Train a linear model on one rank with sparse gradients, and check that its loss falls."""
    topology = hpcsgd.init()
    model = torch.nn.Linear(32, 1)
    sparse = hpcsgd.Sparse(hpcsgd.TopK(density=0.1))
    optimizer = hpcsgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), model, topology, method=hpcsgd.bsp(grad_reduce=sparse)
    )
    x = torch.randn(256, 32)
    y = x @ torch.randn(32, 1)
    losses = []
    for _ in range(200):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0], losses[:: len(losses) - 1]
    print(f"trains: loss {losses[0]:.3g} → {losses[-1]:.3g}")


def main(nvcc: str) -> None:
    installed()
    selecting()
    accumulating()
    packing()
    if nvcc:
        print(f"{kernels.Cuda.load().path.name}: loads")
    training()
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}"
    print(f"hpcsgd {importlib.metadata.version('hpcsgd')}, {versions}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
