"""Tests of losses and figures against plain reference implementations."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from hpcsgd.data.windows import IGNORED
from hpcsgd.errors import UserError
from hpcsgd.report.figures import FIGURES, found_in, written
from hpcsgd.train.tasks import Classification, Language, Recommendation, SuperResolution, Task
from hpcsgd.train.tasks.super_resolution import luminance, psnr

DATA: Any = SimpleNamespace(
    path=Path("s.h5"), classes=tuple("abc"), types=4, bptt=5, tokens=60, bytes=None, scale=2
)
TASKS: dict[str, Task] = {
    "classification": Classification(DATA),
    "language": Language(DATA),
    "recommendation": Recommendation(DATA),
    "super-resolution": SuperResolution(DATA),
}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=Generator().manual_seed(seed))


def samples(name: str, n: int = 23) -> tuple[Tensor, Tensor]:
    """Return the scores and targets of n samples."""
    generator = Generator().manual_seed(1)
    match name:
        case "classification":
            y = torch.randint(3, (n,), generator=generator)
            return randn(n, 3) + torch.eye(3)[y], y
        case "language":
            y = torch.randint(4, (n, 5), generator=generator)
            y[-1, :3] = IGNORED
            return randn(n, 5, 4), y
        case "super-resolution":
            y = torch.rand(n, 3, 12, 10, generator=generator)
            return y + randn(n, 3, 12, 10) / 10, y
        case _:
            y = torch.zeros(n, 100)
            y[:, 0] = 1
            return randn(n, 100) + 2 * y, y


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("size", [1, 4, 23])
def test_the_result_does_not_depend_on_the_batches(name: str, size: int) -> None:
    task, (scores, y) = TASKS[name], samples(name)
    tallies = [task.tally(*some) for some in zip(scores.split(size), y.split(size), strict=True)]
    assert all(tally.shape == (task.tallied,) and tally.dtype == torch.float64 for tally in tallies)
    found, whole = task.result(sum(tallies, torch.zeros(()))), task.result(task.tally(scores, y))
    assert found.loss == pytest.approx(whole.loss, rel=1e-6)
    assert found.figures == pytest.approx(whole.figures, rel=1e-6)
    assert found.loss == pytest.approx(task.loss(scores, y).item(), rel=1e-5)
    assert set(found.figures) <= set(FIGURES)


def test_classification() -> None:
    scores, y = samples("classification")
    found = TASKS["classification"].result(TASKS["classification"].tally(scores, y))
    losses = [-math.log(p.softmax(0)[c]) for p, c in zip(scores, y, strict=True)]
    assert found.loss == pytest.approx(sum(losses) / 23, rel=1e-5)
    right = [int(p.argmax()) == int(c) for p, c in zip(scores, y, strict=True)]
    assert found.figures == {"accuracy": sum(right) / 23}


def test_perplexity() -> None:
    scores, y = samples("language")
    found = TASKS["language"].result(TASKS["language"].tally(scores, y))
    rows = zip(scores.view(-1, 4), y.flatten(), strict=True)
    losses = [-math.log(p.softmax(0)[token]) for p, token in rows if token != IGNORED]
    assert len(losses) == 23 * 5 - 3
    mean = sum(losses) / len(losses)
    assert found.loss == pytest.approx(mean, rel=1e-5)
    assert found.figures == {"perplexity": pytest.approx(math.exp(mean), rel=1e-5)}


def test_bits_per_byte() -> None:
    """Bits per byte are reported if the text's number of bytes is known; here 60 tokens have 45."""
    scores, y = samples("language")
    known: Any = SimpleNamespace(**{**vars(DATA), "bytes": 45})
    found = Language(known).result(Language(known).tally(scores, y))
    assert found.figures["bits_per_byte"] == pytest.approx(found.loss / math.log(2) * 60 / 45, rel=1e-6)
    assert written(found.figures).startswith("perplexity ")


def test_windows_at_once_are_bounded_by_memory() -> None:
    wide: Any = SimpleNamespace(types=33_278, bptt=35)
    assert Language(wide).at_once == 28
    wider: Any = SimpleNamespace(types=10**9, bptt=35)
    assert Language(wider).at_once == 1


def test_hits_and_gains() -> None:
    """The definitions are the paper's, with the held-out item's place in the sorted row."""
    scores, y = samples("recommendation")
    hits, gains = [], []
    for row in scores.tolist():
        first = sorted(range(100), key=lambda i: -row[i])[:10]
        hits.append(0 in first)
        gains.append(math.log(2) / math.log(first.index(0) + 2) if 0 in first else 0.0)
    assert 0 < sum(hits) < 23
    assert len(set(gains)) > 4
    found = TASKS["recommendation"].result(TASKS["recommendation"].tally(scores, y))
    expected = {"hr10": sum(hits) / 23, "ndcg10": sum(gains) / 23}
    assert found.figures == pytest.approx(expected)
    p = scores.double().sigmoid()
    losses = -(y * p.log() + (1 - y) * (1 - p).log())
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-5)


def test_psnr() -> None:
    """PSNR is computed per image, from Y of BT.601 in 8 bits, without two pixels at each border."""
    scores, y = samples("super-resolution")
    found = TASKS["super-resolution"].result(TASKS["super-resolution"].tally(scores, y))
    decibels = []
    for image, truth in zip(scores.numpy().astype(np.float64), y.numpy().astype(np.float64), strict=True):
        r, g, b = (np.rint(255 * image.clip(0, 1)) - np.rint(255 * truth)) / 255
        squares = (65.481 * r + 128.553 * g + 24.966 * b)[2:10, 2:8] ** 2
        decibels.append(10 * math.log10(255**2 / squares.mean()))
    assert found.figures == {"psnr": pytest.approx(np.mean(decibels), rel=1e-9)}
    assert found.loss == pytest.approx(np.abs((scores - y).numpy()).mean(), rel=1e-5)


def test_psnr_that_is_known() -> None:
    """White and black differ by 219 in Y, and borders do not count. Equal images have 100 dB."""
    white, black = torch.ones(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)
    assert psnr(white, black, 2).item() == pytest.approx(20 * math.log10(255 / 219), abs=1e-4)
    assert psnr(white, white, 2).item() == 100
    near = white.clone()
    near[:, :, :2], near[:, :, :, -2:] = 0, 0.5
    assert psnr(near, white, 2).item() == 100
    assert psnr(near, white, 1).item() < 20
    assert psnr(white * 3, white, 2).item() == 100  # values above white count as white
    assert luminance(white)[0, 0, 0].item() == pytest.approx(235)
    assert luminance(black)[0, 0, 0].item() == 16


def test_the_tenth_place_counts_and_ties_do_not() -> None:
    scores, y = torch.zeros(3, 100), torch.eye(100)[:1].expand(3, -1)
    scores[0, 1:10], scores[0, 0] = 2, 1  # place 10
    scores[1, 1:11], scores[1, 0] = 2, 1  # place 11
    tally = TASKS["recommendation"].tally(scores, y)  # and one row in which all scores are equal
    assert tally[1:].tolist() == [1, pytest.approx(1 / math.log2(11)), 3]


@pytest.mark.parametrize(
    ("name", "scores", "x", "message"),
    [
        (
            "classification",
            (2, 2),
            (2, 8),
            r"\[2, 2\] for 2 samples, but s.h5 has 3 classes: expected \[2, 3\]",
        ),
        ("classification", (1, 3), (2, 8), r"expected \[2, 3\]"),
        ("language", (2, 5, 3), (2, 5), r"s.h5 has 4 types: expected \[2, 5, 4\]"),
        ("language", (2, 4), (2, 5), r"expected \[2, 5, 4\]"),
        ("super-resolution", (2, 3, 8, 8), (2, 3, 8, 8), r"is reduced 2 times: expected \[2, 3, 16, 16\]"),
        ("super-resolution", (2, 1, 8, 6), (2, 3, 4, 3), r"expected \[2, 3, 8, 6\]"),
        ("recommendation", (2, 5, 1), (2, 5, 2), r"each needs one: expected \[2, 5\]"),
        ("recommendation", (2, 6), (2, 5, 2), r"each needs one: expected \[2, 5\]"),
    ],
)
def test_scores_that_do_not_fit(name: str, scores: Any, x: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"\[model\]: net gives scores of shape .*{message}"):
        TASKS[name].require(torch.zeros(scores), torch.zeros(x), "net")


def test_more_scores_than_classes_or_types_do_fit() -> None:
    TASKS["classification"].require(torch.zeros(2, 5), torch.zeros(2, 8), "net")
    TASKS["language"].require(torch.zeros(2, 5, 6), torch.zeros(2, 5), "net")
    TASKS["recommendation"].require(torch.zeros(2, 5), torch.zeros(2, 5, 2), "net")
    TASKS["super-resolution"].require(torch.zeros(2, 3, 8, 6), torch.zeros(2, 3, 4, 3), "net")


def test_figures_to_read() -> None:
    record = {"loss": 1.0, "ndcg10": 0.25, "hr10": 0.5, "distance": 2.0}
    assert found_in([record, record]) == ["hr10", "ndcg10"]
    assert found_in([record, {"hr10": 0.1}]) == ["hr10"]
    assert found_in([]) == []
    assert written(record) == "HR@10 0.5000  NDCG@10 0.2500"
    assert FIGURES["perplexity"].best([3, 1, 2]) == 1
