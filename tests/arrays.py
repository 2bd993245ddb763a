"""Arrays in which the largest elements are hard to find, and segments of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

NANS = np.array([0x7F800001, 0x7FC00000, 0xFFC12345, 0x7FFFFFFF, 0xFF800001], np.uint32).view(np.float32)
SPECIAL = np.array([0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, 1, *NANS], np.float32)


def normal(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.standard_normal(n)


def heavy(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.laplace(size=n) ** 3


def any_bits(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 2**32, n, np.uint32).view(np.float32)


def denormal(rng: np.random.Generator, n: int) -> np.ndarray:
    return (rng.integers(0, 2**10, n, np.uint32) | rng.integers(0, 2, n, np.uint32) << 31).view(np.float32)


def few_values(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(-3, 4, n)


def special(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice(SPECIAL, n)


def constant(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.full(n, rng.choice([0.0, -2.5, np.inf]))


def all_nan(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.choice(NANS, n)


def ascending(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.arange(n) * rng.choice([1.0, -1.0])


def descending(rng: np.random.Generator, n: int) -> np.ndarray:
    return -np.arange(n)[::-1] * rng.choice([1.0, -1.0])


def periodic(rng: np.random.Generator, n: int) -> np.ndarray:
    return np.arange(n) % int(rng.integers(2, 300))


def one_huge(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.standard_normal(n) * 1e-20
    x[rng.integers(0, n, 1 if n else 0)] = -3e38
    return x


def one_bit_more_at_the_end(rng: np.random.Generator, n: int) -> np.ndarray:
    """Return ones, and at the end the next larger float32, which a threshold slightly too high would miss."""
    return np.where(np.arange(n) < 0.8 * n, np.float32(1), np.nextafter(np.float32(1), np.float32(2)))


def at_the_end(rng: np.random.Generator, n: int) -> np.ndarray:
    x = rng.standard_normal(n)
    x[n - n // 20 :] *= 1000
    return x


MAKERS = (
    normal, heavy, any_bits, denormal, few_values, special, constant, all_nan, ascending, descending,
    periodic, one_huge, at_the_end, one_bit_more_at_the_end,
)  # fmt: skip


def made(maker: Callable[..., np.ndarray], rng: np.random.Generator, n: int, shift: int = 0) -> torch.Tensor:
    """Return `n` float32 elements of `maker`, stored `shift` elements behind an aligned address."""
    x = torch.from_numpy(
        np.concatenate([np.zeros(shift), maker(rng, n)], dtype=np.float32, casting="same_kind")
    )
    return x[shift:]


def lists(*values: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(each, dtype=torch.int64) for each in values)


def cuts(rng: np.random.Generator, n: int, segments: int) -> tuple[torch.Tensor, ...]:
    """Return the starts and stops of disjoint segments of [0, n), and a k for each segment.

    Some segments are empty, and there may be gaps between segments.
    """
    bounds = np.sort(rng.integers(0, n + 1, 2 * segments))
    starts, stops = bounds[::2], bounds[1::2]
    lengths = stops - starts
    k = np.minimum((lengths * rng.choice([0, 0.001, 0.01, 0.3, 1], segments)).astype(int) + 1, lengths)
    return lists(starts.tolist(), stops.tolist(), (k * (rng.random(segments) > 0.1)).tolist())
