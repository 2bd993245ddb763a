"""Scenario files: the example, what is read from a file, and one line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image
from matplotlib.figure import Figure

from hpcsgd.cli.simulate import simulate as simulate_command
from hpcsgd.core import graphs
from hpcsgd.core.waits import All, InNeighbors
from hpcsgd.errors import UserError
from hpcsgd.performance.simulation import Failures, LogNormal, Measured, Wandering, report, simulate
from hpcsgd.performance.simulation.picture import draw
from hpcsgd.performance.simulation.scenario import load

EXAMPLE = Path(__file__).parents[3] / "examples/simulation.toml"
SMALL = """
[job]
groups = 4
steps = 20
[compute]
name = "constant"
mean_seconds = 0.1
[method]
"""
SMALLER = ("--job.groups", "4", "--job.steps", "60", "--failures.work_hours", "8")


def scenario(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_the_example_is_read_as_it_stands() -> None:
    simulation = load(EXAMPLE)
    assert (simulation.layout.P, simulation.layout.K, simulation.layout.hosts) == (128, 8, 256)
    assert simulation.compute == LogNormal(0.12, 0.08)
    assert simulation.stragglers == Wandering(factor=3.0, fraction=0.001)
    assert simulation.waits == All(period=8)
    assert simulation.durations.model_average == 0.06
    assert simulation.durations.message.link == 0.02
    assert simulation.failures == Failures(2000 * 3600, 30, 180, 72 * 3600)


def test_parts_have_the_names_of_job_files(tmp_path: Path) -> None:
    text = SMALL.replace('"constant"\nmean_seconds = 0.1', '"measured"\nseconds = [0.1, 0.2]')
    simulation = load(scenario(tmp_path, text + 'name = "osgp"\noverlap_steps = 2\ngraph = "ring"'))
    assert simulation.compute == Measured([0.1, 0.2])
    assert simulation.waits == InNeighbors(graphs.Ring(), late=2, period=1)


SIMULATED = {
    "ad_psgd": "",
    "allreduce_local_sgd": "sync_every = 4",
    "async_diloco": "sync_every = 4",
    "async_sgd": "",
    "bsp": "",
    "d_psgd": "",
    "delayed": 'method = { name = "diloco", sync_every = 2 }\nsync_delay = 1',
    "des_loc": "sync_every = 4",
    "diloco": 'sync_every = 4\noptimizer_state = "average"',
    "ensemble_sync": "sync_every = 4",
    "fedavg": "per_epoch = 3\nsteps_per_epoch = 8",
    "heloco": "sync_every = 4",
    "hierarchical": 'sync_every = 4\nquantize = "int8"\ngrad_reduce = "reduce_scatter"',
    "noloco": "sync_every = 4",
    "osgp": "overlap_steps = 1",
    "pier": "sync_every = 4\nlazy_fraction = 0.5",
    "sasgd": "sync_every = 4",
    "sgp": "",
    "sparseloco": "sync_every = 4",
    "ssp": "max_staleness = 2",
    "streaming": 'method = { name = "diloco", sync_every = 4 }\nnum_fragments = 2\nsync_delay = 3',
    "switch": 'first = "bsp"\nthen = { name = "noloco", sync_every = 3 }\nat = 7',
}
"""The scenario keys that each method needs, if its waits are known beforehand."""
BY_THE_TRAINING = "after which steps groups average depends on the training"
NOT_SIMULATED = {
    "adacomm": ("initial_sync_every = 4\nadapt_every = 8", BY_THE_TRAINING),
    "async_diloco": ('sync_every = 4\nlocal_steps = "dynamic"', BY_THE_TRAINING),
    "des_loc": (
        "sync_every = 4\nfirst_every = 3",
        "optimizer state is averaged between two synchronizations of the parameters",
    ),
    "post_local": ("sync_every = 4", "when the learning rate falls is not known beforehand"),
    "selsync": ("delta = 0.3", BY_THE_TRAINING),
}


@pytest.mark.parametrize("method", SIMULATED)
def test_a_method_is_simulated_by_its_name(tmp_path: Path, method: str) -> None:
    simulated = simulate(load(scenario(tmp_path, f'{SMALL}name = "{method}"\n{SIMULATED[method]}')))
    assert simulated.seconds == pytest.approx(2.0, rel=1e-9)
    assert simulated.steps_per_second == pytest.approx(10.0, rel=1e-9)
    assert simulated.samples_per_second == pytest.approx(40.0, rel=1e-9)
    assert report.lines(simulated)[4] == "waiting   none"


@pytest.mark.parametrize("method", NOT_SIMULATED)
def test_what_depends_on_the_training_is_refused(tmp_path: Path, method: str) -> None:
    given, why = NOT_SIMULATED[method]
    path = scenario(tmp_path, f'{SMALL}name = "{method}"\n{given}')
    with pytest.raises(UserError, match=rf"job.toml: \[method\]: this method cannot be simulated: {why}"):
        load(path)


def test_steps_of_an_epoch_have_to_be_known(tmp_path: Path) -> None:
    path = scenario(tmp_path, SMALL + 'name = "hierarchical"\nsync_every = { epoch = 1 }')
    with pytest.raises(
        UserError, match=r"\[method\] sync_every: how many steps an epoch has is not known here"
    ):
        load(path)
    assert load(path, ["--job.steps_per_epoch", "6"]).waits == All(period=6)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--job.group 4", "--job.group 4: unknown key: did you mean 'groups'?"),
        ("--messages.gather_seconds -1", "--messages.gather_seconds -1: expected number ≥ 0"),
        (
            "--method.name hierachical",
            r".*simulation.toml: \[method\] name: no 'hierachical'; did you mean 'hierarchical'?",
        ),
        (
            "--method.sync_evry 3",
            r".*simulation.toml: \[method\]: hierarchical has no argument 'sync_evry'; "
            r"did you mean 'sync_every'",
        ),
        (
            "--compute.name normal",
            r".*simulation.toml: \[compute\] name: no 'normal'; did you mean 'lognormal'",
        ),
        (
            "--compute.sigma=-1",
            r".*simulation.toml: \[compute\]: sigma = -1: a standard deviation is 0 or more",
        ),
        ("--failures.mtbf_hours_per_node 0", "--failures.mtbf_hours_per_node 0: expected number > 0"),
    ],
)
def test_a_mistake_is_one_line(words: str, line: str) -> None:
    with pytest.raises(UserError, match=f"^{line.replace('?', '[?]')}") as told:
        load(EXAMPLE, words.split())
    assert "\n" not in str(told.value)


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"job.toml: \[job\] groups is missing: expected int ≥ 1"):
        load(scenario(tmp_path, '[job]\n[compute]\nname = "constant"\n[method]\nname = "bsp"'))


def test_lines_and_json_say_the_same() -> None:
    simulated = simulate(load(EXAMPLE, SMALLER))
    told = json.loads(json.dumps(report.record(simulated)))
    lines = dict(line.split(maxsplit=1) for line in report.lines(simulated))
    assert lines["speed"].startswith(f"{told['steps_per_second']:.4g} steps/s")
    assert lines["goodput"] == f"{told['goodput']:.1%}"
    assert sum(told["shares"].values()) == pytest.approx(1)
    assert f"in the group {told['shares']['in the group']:.1%}" in lines["waiting"]
    assert told["checkpointing"]["young_seconds"] > 0
    assert len(told["by_step"]["mean_seconds"]) == 60
    assert told["by_step"]["last_seconds"][-1] == told["seconds"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--job.steps", "1"), ("--job.groups", "1", "--job.steps", "2000")])
def test_it_is_drawn(tmp_path: Path, more: tuple[str, ...]) -> None:
    draw(simulate(load(EXAMPLE, (*SMALLER, *more))), tmp_path / "job.png")
    picture = image.imread(tmp_path / "job.png")
    assert picture.shape[1] > 1000
    assert picture[..., :3].std() > 0.05


def test_the_runs_first_and_last_step_are_at_the_edges_of_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = list[Figure]()
    monkeypatch.setattr(
        "hpcsgd.performance.simulation.picture.save", lambda figure, _: figures.append(figure)
    )
    draw(simulate(load(EXAMPLE, SMALLER)), Path("not-written.png"))
    steps, groups, _ = figures[0].axes
    times = np.asarray(groups.lines[0].get_xdata())
    for axes in (steps, groups):
        assert axes.get_xlim() == (times.min(), times.max())


FAILING = (
    SMALL
    + """name = "bsp"
[failures]
mtbf_hours_per_node = 0.01
checkpoint_seconds = 1
"""
)
ON_LINES = {
    "an unknown key": (
        f"{SMALL}name = 'bsp'\n[messages]\nupdate = 1",
        11,
        "[messages] update = 1: unknown key",
    ),
    "a value": (SMALL.replace("20", "0") + "name = 'bsp'", 4, "[job] steps = 0: expected int ≥ 1"),
    "an infinite value": (SMALL.replace("0.1", "inf") + "name = 'bsp'", 7, "[compute]: mean_seconds = inf: "),
    "a key that is missing": (SMALL.replace("groups", "# "), 2, "[job] groups is missing"),
    "an argument of a part": (
        f"{SMALL}name = 'hierarchical'\nsync_every = 0",
        10,
        "[method]: sync_every = 0: ",
    ),
    "a part": (SMALL.replace('"constant"', '"normal"') + "name = 'bsp'", 6, "[compute] name: no 'normal'"),
    "a method": (f"{SMALL}name = 'selsync'\ndelta = 0.3", 8, "[method]: this method cannot be simulated"),
    "a sum": (
        SMALL.replace("20", "1_000_000_000_000") + "name = 'bsp'",
        4,
        "[job] steps = 1000000000000 of 4 ranks",
    ),
    "what is seen while it runs": (
        f"{SMALL}name = 'bsp'\n[stragglers]\nname = 'lasting'\nfactor = 2\nranks = [7]",
        13,
        "[stragglers]: ranks = [7]: there are 4 ranks",
    ),
    "work": (f"{FAILING}work_hours = 9e9", 13, "[failures] work_hours = 9e+09: something fails"),
    "a restart": (f"{FAILING}restart_seconds = 99", 13, "[failures] restart_seconds = 99: something fails"),
    "a checkpoint": (FAILING.replace("= 1\n", "= 80\n"), 12, "[failures] checkpoint_seconds = 80: something"),
    "an interval": (
        f"{FAILING}checkpoint_every_seconds = 99",
        13,
        "[failures] checkpoint_every_seconds = 99: something",
    ),
}
"""By mistake: the file, the line and the beginning of the message."""


@pytest.mark.parametrize("wrong", ON_LINES)
def test_the_command_names_the_line(tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, line, message = ON_LINES[wrong]
    path = scenario(tmp_path, text)
    with pytest.raises(SystemExit):
        simulate_command(path)
    assert capsys.readouterr().err.startswith(f"hpcsgd: {path}:{line}: {message}")


def test_no_line_is_named_for_what_a_flag_gives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = scenario(tmp_path, f"{SMALL}name = 'hierarchical'\nsync_every = 2")
    with pytest.raises(SystemExit):
        simulate_command(path, "--method.sync_every", "0")
    assert capsys.readouterr().err.startswith(f"hpcsgd: {path}: [method]: sync_every = 0: ")
