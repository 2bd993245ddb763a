from __future__ import annotations

import json

import pytest

from hpcsgd.report.metrics import Record
from hpcsgd.report.summary import byte_text, summary, summary_text


def step(number: int, samples: int, samples_per_s: float, **phases: float) -> Record:
    place = {"kind": "step", "step": number, "epoch": 1 + number // 20, "loss": 1 / number, "lr": 0.1}
    speed = {"samples": samples, "samples_per_s": samples_per_s}
    phase_bytes = {"allgather": 500}
    return {**place, **speed, "phase_seconds": phases, "phase_bytes": phase_bytes}


def evaluation(number: int, accuracy: float, loss: float) -> Record:
    place = {"kind": "eval", "step": number, "epoch": number // 10}
    return {**place, "loss": loss, "accuracy": accuracy, "seconds": 1.0}


RECORDS = [
    {"kind": "sync", "step": 8, "distance": 0.1},
    step(10, 100, 50.0, compute=1.5, data=0.5),
    evaluation(10, 0.75, 0.5),
    {"kind": "sync", "step": 16, "distance": 0.3},
    step(20, 300, 100.0, compute=2.0, allgather=1.0),
    evaluation(20, 0.9, 0.2),
    {"kind": "sync", "step": 24, "distance": 0.2},
    step(30, 100, 100.0, compute=1.0),
    evaluation(30, 0.85, 0.25),
]


def test_the_numbers_add_up() -> None:
    assert summary(RECORDS) == {
        "steps": 30,
        "epochs": 2,
        "samples": 500,
        "seconds": pytest.approx(6.0),
        "samples_per_s": pytest.approx(500 / 6),
        "training_loss": pytest.approx(1 / 30),
        "loss": 0.25,
        "best_loss": 0.2,
        "accuracy": 0.85,
        "best_accuracy": 0.9,
        "best_epoch": 2,
        "model_averages": 3,
        "lssr": 0.9,
        "mean_density": None,
        "mean_select_seconds": None,
        "median_distance": 0.2,
        "distance": None,
        "mean_staleness": None,
        "mean_ahead": None,
        "seconds_per_phase": {"compute": 4.5, "allgather": 1.0, "data": 0.5},
        "bytes_per_phase": {"allgather": 1500},
        "bytes_per_link": {},
    }


def test_the_last_lines_say_it_all() -> None:
    assert summary_text(summary(RECORDS)).splitlines() == [
        "trained   30 steps, 2 epochs, 500 samples in 0:00:06",
        "speed     83 samples/s",
        "loss      0.03333 in training",
        "test      accuracy 0.8500 (best 0.9000 after epoch 2), loss 0.25",
        "sync      3 model averages, median distance 0.2; 90.0% of steps were local",
        "time      compute 75%, allgather 17%, data 8%",
        "sent      allgather 1.5 kB",
    ]


@pytest.mark.parametrize(
    ("progress", "epochs", "text"),
    [(500 / 1318, 0.3794, "0.3794 epochs"), (1.0, 1, "1 epoch"), (2.0 + 1 / 3, 2.3333, "2.333 epochs")],
)
def test_an_epoch_that_is_not_over_counts_in_part(progress: float, epochs: float, text: str) -> None:
    numbers = summary([{**step(500, 16_000, 100.0), "progress": progress}])
    assert numbers["epochs"] == epochs
    assert f"trained   500 steps, {text}, 16,000 samples" in summary_text(numbers)


GOSSIP = [
    {**step(10, 100, 50.0), "link_bytes": {"1": 2000, "3": 500}, "counts": {"staleness": {"0": 3, "2": 1}}},
    {
        **step(20, 100, 50.0),
        "link_bytes": {"1": 2000},
        "counts": {"staleness": {"1": 4}, "ahead": {"0": 1, "1": 3}},
    },
    {**evaluation(20, 0.9, 0.2), "distance": 0.125},
]


def test_groups_that_never_synchronize_all_together() -> None:
    numbers = summary(GOSSIP)
    assert (numbers["mean_staleness"], numbers["mean_ahead"], numbers["distance"]) == (0.75, 0.75, 0.125)
    assert numbers["bytes_per_link"] == {"1": 4000, "3": 500}
    assert {
        "groups    at distance 0.125 from their mean at the last test",
        "stale     by 0.75 updates of others in the mean, 0.75 steps ahead of the slowest group",
        "links     from rank 0 to 2 groups, 4 kB at most",
    } <= set(summary_text(numbers).splitlines())


def test_steps_that_were_chosen() -> None:
    chosen = [
        {"kind": "method", "step": n, "delta": 0.1, "wants_sync": 0.0, "synced": float(n == 1)}
        for n in (1, 2, 3, 4)
    ]
    assert summary(chosen)["lssr"] == 1.0
    assert summary(GOSSIP)["lssr"] is None
    shared = {**step(4, 100, 50.0), "grads_shared": 1}
    numbers = summary([*chosen, shared])
    assert numbers["lssr"] == 0.75
    line = "sync      75.0% of steps were local; in the others the groups shared gradients"
    assert line in summary_text(numbers).splitlines()


def test_sparse_gradient_reductions() -> None:
    sent = [
        {"kind": "method", "step": n, "density": 0.01 * n, "error": 1.0, "select_seconds": 0.002}
        for n in (1, 2)
    ]
    numbers = summary([*sent, step(2, 100, 50.0)])
    assert numbers["mean_density"] == pytest.approx(0.015)
    line = "sparse    1.500% of the gradients sent, selected in 0.002 s a step"
    assert line in summary_text(numbers).splitlines()


def test_a_density_of_something_else() -> None:
    """A method may record a metric of that name for another purpose."""
    numbers = summary([{"kind": "method", "step": 1, "density": 0.5}, step(2, 100, 50.0)])
    assert "sparse" not in summary_text(numbers)


@pytest.mark.parametrize("count", range(len(RECORDS) + 1))
def test_any_part_of_a_run_can_be_summed_up(count: int) -> None:
    numbers = summary(RECORDS[:count])
    assert json.loads(json.dumps(numbers)) == numbers
    assert summary_text(numbers).startswith("trained ")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (183_600_000, "184 MB"), (5e15, "5e+03 TB")],
)
def test_bytes_are_readable(size: float, text: str) -> None:
    assert byte_text(size) == text


def test_the_best_perplexity_is_the_lowest() -> None:
    tested = [{**evaluation(10 * n, 0, n), "perplexity": p} for n, p in ((1, 90.0), (2, 70.5), (3, 80.25))]
    for record in tested:
        del record["accuracy"]
    numbers = summary([*RECORDS[:2], *tested])
    assert (numbers["perplexity"], numbers["best_perplexity"], numbers["best_epoch"]) == (80.25, 70.5, 2)
    assert "accuracy" not in numbers
    assert (
        "test      perplexity 80.25 (best 70.50 after epoch 2), loss 3" in summary_text(numbers).splitlines()
    )


def test_two_figures() -> None:
    tested = [{**evaluation(10 * n, 0, 0.25), "hr10": h, "ndcg10": h / 2} for n, h in ((1, 0.5), (2, 0.25))]
    for record in tested:
        del record["accuracy"]
    numbers = summary(tested)
    assert (numbers["hr10"], numbers["best_hr10"], numbers["best_epoch"]) == (0.25, 0.5, 1)
    assert (numbers["ndcg10"], numbers["best_ndcg10"]) == (0.125, 0.25)
    line = "test      HR@10 0.2500 (best 0.5000 after epoch 1), NDCG@10 0.1250, loss 0.25"
    assert line in summary_text(numbers).splitlines()


def test_tokens_and_the_model_s_work() -> None:
    """Utilization is weighted by time: the second record took twice as long as the first."""
    more = [
        {"tokens": 700, "flops": 1.5e9, "tokens_per_s": 350.0, "gradient_norm": 2.0, "utilization": 0.5},
        {"tokens": 1400, "flops": 3.0e9, "tokens_per_s": 350.0, "utilization": 0.2},
    ]
    records = [{**step(n, 100 * n, 50.0), **more[n - 1]} for n in (1, 2)]
    numbers = summary(records)
    assert (numbers["tokens"], numbers["flops"], numbers["gradient_norm"]) == (2100, 4.5e9, 2.0)
    assert numbers["utilization"] == pytest.approx(0.3)
    speed = "speed     350 tokens/s, 30.0% of the peak, 2.14 MFLOP a token"
    assert speed in summary_text(numbers).splitlines()
    assert json.loads(json.dumps(numbers)) == numbers


def test_images_have_flops_where_somebody_asked() -> None:
    numbers = summary([{**step(1, 100, 50.0), "flops": 5e9, "utilization": 0.125}])
    speed = "speed     50 samples/s, 12.5% of the peak, 50 MFLOP a sample"
    assert speed in summary_text(numbers).splitlines()
