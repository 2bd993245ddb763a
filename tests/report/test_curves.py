from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib import image
from matplotlib.figure import Figure

from hpcsgd.report.curves import plot_curves
from hpcsgd.report.metrics import Record

STEPS: list[Record] = [
    {
        "kind": "step",
        "step": number,
        "epoch": 1,
        "loss": 1 / number,
        "lr": 0.1,
        "samples": 10,
        "samples_per_s": 10.0,
        "phase_seconds": {"compute": 1.0, "allgather": 0.5},
        "phase_bytes": {"allgather": 100},
    }
    for number in range(1, 60)
]
ALONE: list[Record] = [{**record, "phase_bytes": {}, "phase_seconds": {}} for record in STEPS]
EVALUATIONS: list[Record] = [
    {
        "kind": "eval",
        "step": n,
        "epoch": n,
        "loss": 1 / n,
        "accuracy": 0.9 - 0.1 * (n - 2) ** 2,
        "seconds": 1.0,
    }
    for n in range(1, 4)
]
SYNCS: list[Record] = [{"kind": "sync", "step": n, "distance": 10.0**-n} for n in range(1, 5)]


@pytest.fixture
def titles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the panel titles of each figure that is saved."""
    seen: list[str] = []
    save = Figure.savefig

    def spy(figure: Figure, *arguments: object, **options: object) -> None:
        seen.extend(title for axes in figure.axes if (title := axes.get_title(loc="left")))
        save(figure, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Figure, "savefig", spy)
    return seen


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return a list that collects the figures, which are not saved."""
    found: list[Figure] = []
    monkeypatch.setattr("hpcsgd.report.curves.save", lambda figure, target: found.append(figure))
    return found


LOSS, PHASES, ACCURACY = (
    "training loss: 0.01695",
    "where time and bytes went",
    "test accuracy: best 0.9000 at epoch 2",
)
DISTANCE = "distance D at synchronizations: median 0.0055"
CHOSEN: list[Record] = [
    {"kind": "method", "step": n, "delta": 0.5 / n, "wants_sync": 0.0, "synced": float(n < 3)}
    for n in range(1, 4)
]
SPARSE: list[Record] = [
    {"kind": "method", "step": n, "density": 0.01 * n, "error": 1.5 * n, "select_seconds": 0.001}
    for n in (1, 2, 3)
]
APART: list[Record] = [{**record, "distance": 0.5} for record in EVALUATIONS]
COUNTS = {"staleness": {"0": 3, "2": 1}, "ahead": {"1": 4}}
LATE: list[Record] = [{**record, "counts": COUNTS} for record in ALONE]
OF_TOKENS: list[Record] = [
    {**record, "gradient_norm": 2.0, "tokens_per_s": 500.0 * n, "utilization": 0.25}
    for n, record in enumerate(ALONE, start=1)
]
UNHEARD_OF: list[Record] = [
    *({**record, "counts": {"hops": {"2": 1}}} for record in ALONE),
    *({"kind": "method", "step": n, "flavour": 10.0**-n, "boil_seconds": 0.5} for n in range(1, 40)),
    {"kind": "method", "step": 40, "stir_seconds": 0.25},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("records", "panels"),
    [
        (STEPS + EVALUATIONS + SYNCS, [LOSS, ACCURACY, DISTANCE, PHASES]),
        (STEPS + EVALUATIONS, [LOSS, ACCURACY, PHASES]),
        (ALONE, [LOSS]),
        (ALONE + SPARSE, [LOSS, "density: 2.000% sent", "select_seconds"]),
        (APART, [ACCURACY, "distance D at evaluations: median 0.5"]),
        (LATE, [LOSS, "how late and how far ahead"]),
        (OF_TOKENS, [LOSS, "norm of the gradient: median 2", "tokens/s: median 15,000"]),
        (UNHEARD_OF, [LOSS, "how often which number", "flavour", "seconds of each step"]),
        (SYNCS, [DISTANCE]),
        (CHOSEN, ["change of the gradient Δ: 50.0% of steps local"]),
        (STEPS[:1] + CHOSEN[:1], ["training loss: 1", "delta", "wants_sync", "synced", PHASES]),
        (STEPS[:1], ["training loss: 1", PHASES]),
        (EVALUATIONS[:1], ["test accuracy: best 0.8000 at epoch 1"]),
    ],
    ids=[
        "all",
        "no meetings",
        "no phases",
        "sparse",
        "gossip",
        "waiting for nobody",
        "tokens",
        "notes that nobody knows",
        "meetings only",
        "chosen steps",
        "one chosen step",
        "one step",
        "one evaluation",
    ],
)
def test_each_panel_with_data_is_drawn_and_no_other(
    tmp_path: Path, titles: list[str], records: list[Record], panels: list[str]
) -> None:
    plot_curves(records, tmp_path / "curves.png")
    assert titles == panels
    height, width, _ = image.imread(tmp_path / "curves.png").shape
    assert width >= 1000
    assert height >= 380
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_the_bars_of_phases(figures: list[Figure]) -> None:
    """The bar of seconds is above that of bytes; both span 0 to 100 %, and the legend has the amounts."""
    plot_curves(STEPS, Path("curves.png"))
    bars = figures[0].axes[-1]
    assert bars.yaxis_inverted()
    assert [label.get_text() for label in bars.get_yticklabels()] == ["seconds", "bytes"]
    assert bars.get_xlim() == (0, 1)
    legend = bars.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["compute: 59 s", "allgather: 29.5 s, 5.9 kB"]
    places = [each.get_path().get_extents(each.get_patch_transform()) for each in bars.patches]
    assert [place.width for place in places] == pytest.approx([2 / 3, 0, 1 / 3, 1]), "seconds, bytes, twice"
    assert [place.x0 for place in places] == pytest.approx([0, 0, 2 / 3, 0])


@pytest.mark.parametrize(("densities", "top"), [((0.01, 0.03), 0.033), ((0.0, 0.0), 1.0)])
def test_the_axes_of_densities(figures: list[Figure], densities: tuple[float, ...], top: float) -> None:
    """Both axes begin at 0, even if nothing was sent; the errors' own axis has no grid."""
    records = [{"kind": "method", "step": n, "density": d, "error": 1.5} for n, d in enumerate(densities)]
    plot_curves(records, Path("curves.png"))
    left, right = figures[0].axes
    assert left.get_ylim() == pytest.approx((0, top))
    assert right.get_ylim()[0] == 0
    assert right.spines["right"].get_visible()
    assert not any(line.get_visible() for line in right.get_ygridlines())


def test_changes_of_the_gradient_have_a_logarithmic_axis(figures: list[Figure]) -> None:
    """They differ by orders of magnitude."""
    plot_curves(CHOSEN, Path("curves.png"))
    assert figures[0].axes[0].get_yscale() == "log"


def test_nothing_recorded_nothing_drawn(tmp_path: Path) -> None:
    plot_curves([], tmp_path / "curves.png")
    assert not list(tmp_path.iterdir())


def test_a_failed_drawing_leaves_the_old_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(figure: Figure, target: Path, **options: object) -> None:
        target.write_bytes(b"half")
        raise OSError("disk full")

    (tmp_path / "curves.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        plot_curves(STEPS, tmp_path / "curves.png")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("curves.png", b"old")]


def test_another_figure_than_accuracy(tmp_path: Path, titles: list[str]) -> None:
    """The best perplexity is the lowest one."""
    tested = [{**r, "perplexity": 100.0 + (r["epoch"] - 2) ** 2} for r in EVALUATIONS]
    plot_curves([{k: v for k, v in r.items() if k != "accuracy"} for r in tested], tmp_path / "c.png")
    assert titles == ["test perplexity: best 100.00 at epoch 2"]
