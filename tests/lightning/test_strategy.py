"""Tests of `HpcsgdStrategy`: the same bits as a plain loop, and Lightning's callbacks, loaders and modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_runs import by_torchrun

slow = pytest.mark.slow
RunCases = Callable[..., dict[str, list[Any]]]
STEPS = 22
"""The steps of 2 epochs of 11 batches."""
GRADIENTS = {
    "clip_norm": STEPS,
    "clip_value": STEPS,
    "accumulated": 8,
    "accumulated_by_schedule": 14,
    "manual": 12,
}
PRECISIONS = {"bf16_mixed": STEPS, "bf16_true": STEPS, "own_sampler": STEPS}
"""Cases with a plain loop and their numbers of updates. One program runs all of them."""
BEHAVIOUR = ("two_optimizers", "early_stopping", "swa", "evaluation", "streams")
ARGUMENTS = ("by_name", "docstrings", "metrics", "method_object", "refusals")


def require_same(of_ranks: list[Any], steps: int) -> None:
    """Check that all ranks have the plain loop's averaged model and sent as many bytes in each phase."""
    for found in of_ranks:
        assert found["lightning"] == found["plain"] == of_ranks[0]["plain"]
        assert found["plain"][-1] == steps
        assert found["sent"][0] == found["sent"][1]
        assert found["sent"][0]["grad_reduce"] > 0


@pytest.mark.slow
def test_lightning_trains_as_a_plain_loop(run_cases: RunCases) -> None:
    require_same(run_cases("bits")["bits"], STEPS)


@slow
def test_lightning_trains_as_a_plain_loop_by_torchrun(run_cases: RunCases) -> None:
    """Without MPI, parameters have the same bits on 2 × 2 ranks.

    Buffers may differ, because the average over 4 ranks adds them in another order.
    """
    found = run_cases("bits", by=by_torchrun)["bits"]
    require_same(found, STEPS)
    assert found[0]["plain"][0] == run_cases("bits")["bits"][0]["plain"][0]


@slow
@pytest.mark.parametrize(("case", "steps"), GRADIENTS.items())
def test_clipping_and_accumulation_are_those_of_a_plain_loop(
    case: str, steps: int, run_cases: RunCases
) -> None:
    found = run_cases(*GRADIENTS)[case]
    require_same(found, steps)
    assert found[0]["plain"] != run_cases("bits")["bits"][0]["plain"]


@slow
@pytest.mark.parametrize(("case", "steps"), PRECISIONS.items())
def test_precision_and_samplers_are_those_of_a_plain_loop(case: str, steps: int, run_cases: RunCases) -> None:
    found = run_cases(*PRECISIONS, "fp16_mixed")[case]
    require_same(found, steps)
    assert found[0]["plain"] != run_cases("bits")["bits"][0]["plain"]


@slow
def test_float16_skips_the_same_steps_on_all_ranks(run_cases: RunCases) -> None:
    found = run_cases(*PRECISIONS, "fp16_mixed")["fp16_mixed"]
    steps = found[0]["plain"][-1]
    assert 5 < steps < found[0]["global_step"] == STEPS
    require_same(found, steps)


@slow
def test_two_optimizers_train_as_in_a_plain_loop(run_cases: RunCases) -> None:
    for found in run_cases(*BEHAVIOUR)["two_optimizers"]:
        assert found["toggled"] == found["not toggled"] == found["plain"]
        assert found["plain"][2:] == [11, 11]
        assert found["global_step"] == 11 + 11


@slow
def test_all_ranks_stop_when_one_wants_to(run_cases: RunCases) -> None:
    first, *others = run_cases(*BEHAVIOUR)["early_stopping"]
    assert first[0] == 2
    assert others == [first] * 3


@slow
def test_swa_averages_the_averaged_model(run_cases: RunCases) -> None:
    (digest, difference), *others = run_cases(*BEHAVIOUR)["swa"]
    assert difference < 1e-6
    assert [other[0] for other in others] == [digest] * 3


@slow
def test_evaluations_are_of_the_averaged_model(run_cases: RunCases) -> None:
    found = run_cases(*BEHAVIOUR)["evaluation"]
    sizes = [each["sizes"] for each in found]
    for name in ("fit", "after", "test"):
        assert len({tuple(each[name]) for each in sizes}) == 1, name
    final = sizes[0]["fit"][-1]
    assert {*sizes[0]["after"], *sizes[0]["test"]} == {final}
    # the groups begin equal, differ in the second epoch, and begin the second fit with the average
    begins, apart, again = zip(*(each["own"] for each in sizes), strict=True)
    assert len({*begins}) == 1
    assert len({*apart}) == 2
    assert final not in apart
    assert {*again} == {final}
    assert all(each["predicts"] and each["unchanged"] for each in found)
    assert [each["end"] for each in found] == [found[0]["end"]] * 4


@slow
def test_streams_of_unlike_length_end_together(run_cases: RunCases) -> None:
    found = run_cases(*BEHAVIOUR)["streams"]
    assert found == [found[0]] * 4
    assert found[0][-1] == 10


@slow
def test_the_strategy_has_a_name(run_cases: RunCases) -> None:
    assert run_cases(*ARGUMENTS)["by_name"] == [[1, 4, 11]] * 4


@slow
def test_examples_of_docstrings_run(run_cases: RunCases) -> None:
    assert run_cases(*ARGUMENTS)["docstrings"] == [[0, 5]] * 4


@slow
def test_metrics_are_logged(run_cases: RunCases) -> None:
    for found in run_cases(*ARGUMENTS)["metrics"]:
        assert found["logged"]["hpcsgd/distance"] > 0
        assert found["of two"] == ["hpcsgd/distance/0", "hpcsgd/distance/1", "hpcsgd/sent_bytes"]
        head, *lines = found["lines"]
        rows = [dict(zip(head.split(","), line.split(","), strict=True)) for line in lines]
        assert [row["hpcsgd/distance"] != "" for row in rows] == [False] * 3 + [True] * 8
        assert rows[3]["hpcsgd/distance"] == rows[6]["hpcsgd/distance"] != rows[7]["hpcsgd/distance"]
        sent = [float(row["hpcsgd/sent_bytes"]) for row in rows]
        assert sent[0] == found["sent"]["grad_reduce"] / 11 * 2
        assert 0 <= sent[-1] - sum(found["sent"].values()) < 100
        assert found["logged"]["hpcsgd/sent_bytes"] == sent[-1]


@slow
def test_an_object_of_a_method_begins_each_training_without_state(run_cases: RunCases) -> None:
    for first, second in run_cases(*ARGUMENTS)["method_object"]:
        assert first == second


REFUSALS = {
    "devices": "Trainer(devices=2, num_nodes=1): 4 ranks were started on 1 node: "
    "give Trainer(devices=4, num_nodes=1)",
    "nodes": "Trainer(devices=4, num_nodes=2): 4 ranks were started on 1 node: "
    "give Trainer(devices=4, num_nodes=1)",
    "unknown": "HpcsgdStrategy has no argument 'bucket_cap'; did you mean 'bucket_cap_mb'?",
    "renamed": "HpcsgdStrategy has no argument 'overlap'; did you mean 'overlap_grad_reduce'?",
    "by the Trainer": "HpcsgdStrategy has no argument 'gradient_accumulation_steps': "
    "give Trainer(accumulate_grad_batches=…)",
    "groups": "groups = 3 does not divide the 4 ranks",
    "no method": "HpcsgdStrategy: method = 'hierarchical': expected a Method or a function",
    "one method": "method: the module has 2 optimizers, and each needs a method of its own",
    "sampler": "hpcsgd.Sampler has divided the samples among the ranks",
    "metrics": "LogMetrics: SingleDeviceStrategy has no metrics of hpcsgd: train with HpcsgdStrategy",
    "nothing to train": "the optimizer has no trainable parameters",
    "precision": "precision plugin Odd: HpcsgdStrategy supports the precisions",
    "sync_batchnorm": "net.1 is torch's SyncBatchNorm and has no process group",
}


@slow
@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_work_is_refused(what: str, run_cases: RunCases) -> None:
    for found in run_cases(*ARGUMENTS)["refusals"]:
        assert found.keys() == REFUSALS.keys()
        assert found[what].startswith(REFUSALS[what]), found[what]
