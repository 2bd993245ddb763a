"""The estimate is compared with dense matrices, computed as in the paper."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fisher_matrices import dense
from hpcsgd.engine.natural_gradient.fisher import DELTA, Fisher, Shrinkage, natural

ALPHA = 4.0


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(N: int, D: int, seed: int = 0) -> Tensor:
    """Return rows whose scatter matrix has eigenvalues from about 1 down to 1/D²."""
    return randn(N, D, seed=seed) / torch.arange(1, D + 1)


def matrix(shrinkage: Shrinkage) -> Tensor:
    R, E = shrinkage.R, shrinkage.E
    return torch.eye(R.shape[1], dtype=R.dtype) - R.T @ E.diag() @ R


def estimate(X: Tensor, rank: int) -> Fisher:
    F = Fisher.of(X, rank)
    assert F is not None
    return F


def angle(F: Fisher, directions: Tensor) -> float:
    """Return the largest sine of the angles between the row space of R and that of `directions`."""
    rest = directions - directions @ F.R.T @ F.R
    return torch.linalg.matrix_norm(rest, 2).item()


@pytest.mark.parametrize("eta", [0.03, 0.5])
def test_an_update_is_the_papers(eta: float) -> None:
    N, D, r = 30, 9, 4
    F, X = estimate(rows(N, D, seed=1), r), rows(N, D, seed=2)
    S = X.T @ X / N
    T = eta * S + (1 - eta) * dense(F)
    Y = F.R @ T
    C, U = torch.linalg.eigh(Y @ Y.T)
    R = C.rsqrt().diag() @ U.T @ Y
    rho = (T.trace() - C.sqrt().sum()) / (D - r)
    expected = R.T @ (C.sqrt() - rho).diag() @ R + rho * torch.eye(D, dtype=torch.float64)
    found = F.updated(X, eta)
    torch.testing.assert_close(dense(found), expected, rtol=0, atol=1e-14)
    assert found.trace == pytest.approx(T.trace().item(), rel=1e-12)


@pytest.mark.parametrize("alpha", [0.0, ALPHA])
def test_shrinkage_is_the_inverse_of_the_smoothed_matrix(alpha: float) -> None:
    D = 7
    F = estimate(rows(40, D), 3)
    G = dense(F) + alpha * dense(F).trace() / D * torch.eye(D, dtype=torch.float64)
    beta = F.rho + alpha * dense(F).trace() / D
    torch.testing.assert_close(matrix(F.shrinkage(alpha)), beta * G.inverse(), rtol=0, atol=1e-12)


def test_full_rank_is_the_scatter_itself() -> None:
    N, D = 50, 6
    X = rows(N, D)
    F = estimate(X, rank=D)
    assert len(F.R) == D - 1
    for _ in range(200):
        F = F.updated(X, 0.3)
    torch.testing.assert_close(dense(F), X.T @ X / N, rtol=0, atol=1e-12)


def test_full_rank_gives_the_exact_natural_gradient() -> None:
    X, Y = rows(60, 6, seed=1), rows(60, 5, seed=2)
    inside, outside = estimate(X, rank=6), estimate(Y, rank=5)
    for _ in range(300):
        inside, outside = inside.updated(X, 0.5), outside.updated(Y, 0.5)
    G = randn(5, 6, seed=3)
    expected = torch.linalg.solve(Y.T @ Y, G) @ torch.linalg.inv(X.T @ X)
    found = natural(G, outside.shrinkage(0), inside.shrinkage(0))
    assert found is not None
    torch.testing.assert_close(found, expected * G.norm() / expected.norm(), rtol=0, atol=1e-7)


def test_follows_the_largest_directions_of_a_stream() -> None:
    """The estimate finds the largest eigenvectors, their eigenvalues, and the mean of the others."""
    D, r = 40, 5
    true = torch.cat([torch.tensor([64.0, 32, 16, 8, 4]), torch.full((D - r,), 0.25)]).double()
    turned = torch.linalg.qr(randn(D, D, seed=9)).Q

    def batch(t: int) -> Tensor:
        return randn(128, D, seed=t) * true.sqrt() @ turned.T

    F = estimate(batch(1000), r)
    for t in range(300):
        F = F.updated(batch(t), 0.03)
    assert angle(F, turned[:, :r].T) < 0.2
    torch.testing.assert_close(F.eigenvalues, true[:r], rtol=0.15, atol=0)
    assert F.rho == pytest.approx(0.25, rel=0.1)


def test_a_stream_that_changes_is_followed() -> None:
    D = 20
    first, then = torch.eye(D, dtype=torch.float64)[:2], torch.eye(D, dtype=torch.float64)[10:12]

    def batch(t: int, directions: Tensor) -> Tensor:
        return randn(64, D, seed=t) / 10 + randn(64, 2, seed=t + 1000) @ directions

    F = estimate(batch(0, first), 2)
    assert angle(F, first) < 0.1
    for t in range(1, 100):
        F = F.updated(batch(t, then), 0.1)
    assert angle(F, then) < 0.1


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("right", [True, False])
def test_natural_multiplies_from_both_sides_and_keeps_the_norm(left: bool, right: bool) -> None:
    G = randn(5, 8)
    A = estimate(rows(30, 5, seed=1), 2).shrinkage(ALPHA) if left else None
    B = estimate(rows(30, 8, seed=2), 3).shrinkage(ALPHA) if right else None
    found = natural(G, A, B)
    if A is None and B is None:
        assert found is None
        return
    expected = G if A is None else matrix(A) @ G
    expected = expected if B is None else expected @ matrix(B)
    assert found is not None
    assert found.norm().item() == pytest.approx(G.norm().item(), rel=1e-12)
    torch.testing.assert_close(found, expected * G.norm() / expected.norm(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), 3e38])
def test_what_has_no_norm_stays(value: float) -> None:
    B = estimate(rows(30, 8).float(), 3).shrinkage(ALPHA)
    G = torch.full((5, 8), value)
    found = natural(G, None, B)
    assert found is not None
    torch.testing.assert_close(found, G, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e18])
def test_the_size_of_the_vectors_does_not_matter(size: float) -> None:
    """Derivatives of a mean loss are tiny, and their squares underflow in float32."""
    X = rows(40, 10).float()
    plain = estimate(X, 3).updated(rows(40, 10, seed=1).float(), 0.2)
    scaled = estimate(X * size, 3).updated(rows(40, 10, seed=1).float() * size, 0.2)
    ours, theirs = matrix(scaled.shrinkage(ALPHA)), matrix(plain.shrinkage(ALPHA))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_nothing_is_learned_from_zeros() -> None:
    assert Fisher.of(torch.zeros(3, 5), 2) is None
    F = estimate(rows(20, 5), 2)
    assert F.updated(torch.zeros(3, 5, dtype=torch.float64), 0.5) is F


def test_one_dimension_has_no_direction() -> None:
    assert Fisher.of(torch.ones(4, 1), 3) is None


@given(
    N=st.integers(1, 6),
    D=st.integers(2, 9),
    rank=st.integers(1, 10),
    sizes=st.lists(st.integers(-36, 36), min_size=1, max_size=5),
    alpha=st.sampled_from([0.0, ALPHA]),
    single=st.booleans(),
)
def test_finite_in_finite_out(
    N: int, D: int, rank: int, sizes: list[int], alpha: float, single: bool
) -> None:
    """The estimate stays finite for rows of any size, for few rows, and for rows that are all equal."""
    F = None
    for t, size in enumerate(sizes):
        X = randn(N, D, seed=t).float() * 10.0**size
        X = X[:1].expand(N, D) if single else X
        F = Fisher.of(X, rank) if F is None else F.updated(X, 0.9)
        if F is None:
            continue
        assert F.is_finite()
        assert F.rho >= DELTA * F.eigenvalues[0].item() * (1 - 1e-9)
        torch.testing.assert_close(F.R @ F.R.T, torch.eye(len(F.R)), rtol=0, atol=1e-4)
        found = natural(randn(3, D).float(), None, F.shrinkage(alpha))
        assert found is not None
        assert found.isfinite().all()
