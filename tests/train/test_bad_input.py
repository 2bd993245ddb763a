"""Tests of typical bad input: one line says what was given, what is allowed and where; no file is left."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

import h5py
import pytest

import programs
from train.launches import JOB, Ended, ended, hpcsgd, launch, make_store, start

USER = """\
from torch import nn

def number():
    return 3

def few():
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
"""


@dataclass(frozen=True)
class Case:
    """A mistake in options, job file or number of ranks `n` (0: no launcher), and the line that it leads to.

    If the line ends in "...", the rest depends on the version of a library.
    """

    line: str
    options: str = ""
    changed: tuple[str, str] = ("", "")
    n: int = 0
    environment: dict[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("store") / "small.h5")


@pytest.fixture
def folder(tmp_path: Path, store: Path) -> Path:
    """Return a user's folder with a job file, its dataset file and a module."""
    shutil.copy(store, tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "user.py").write_text(USER)
    return tmp_path


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def assert_one_line(done: Ended, line: str) -> None:
    assert done.code == 1, done.err
    assert done.err.count("\n") == 1, done.err
    if line.endswith("..."):
        assert done.err.startswith(f"hpcsgd: {line[:-3]}")
    else:
        assert done.err == f"hpcsgd: {line}\n"


NAMES = 'Allowed: {}, or "package.module:function"'
RESNETS = "resnet10, resnet101, resnet110, resnet18, resnet20, resnet32, resnet44, resnet50, resnet56"
MODELS = f"alexnet, cifar_resnet, cnn, edsr, gpt, lstm, mlp, ncf, {RESNETS}, transformer, vgg11"

CASES = {
    # the job file
    "no file": Case(
        "none.toml: cannot be read: No such file or directory", changed=("job.toml", "none.toml")
    ),
    "syntax": Case(
        "job.toml: not valid TOML: Expected ']' at the end of a table declaration (at line 4, column 7)",
        changed=("[model]", "[model"),
    ),
    "unknown key": Case(
        "job.toml:13: [training] epoch = 1: unknown key: did you mean 'epochs'? Allowed: "
        "activation_checkpointing, autotune_steps, broadcast_buffers, bucket_cap_mb, channels_last, "
        "checkpoint_every_steps, compile, deterministic, device, epochs, eval_every_epochs, eval_tokens, "
        "log_every, machine, overlap_grad_reduce, overlap_param_gather, peak_tflops, precision, samples, "
        "steps, stop_before_end_s, threads, time_limit_s, tokens",
        changed=("epochs", "epoch"),
    ),
    "unknown section": Case(
        "job.toml:12: [trainings]: unknown section: did you mean 'training'? Allowed: data, "
        "lr_schedule, method, model, optimizer, parallel, rebalance, run, seed, training",
        changed=("[training]", "[trainings]"),
    ),
    "wrong type": Case(
        'job.toml:13: [training] epochs = "1": expected int ≥ 1', changed=("epochs = 1", 'epochs = "1"')
    ),
    "out of range": Case("job.toml:8: [optimizer] lr = -0.1: expected number > 0", changed=("0.1", "-0.1")),
    "missing key": Case(
        "job.toml:7: [optimizer] lr is missing: expected number > 0", changed=("lr = 0.1", "")
    ),
    "override": Case("--training.epochs 0: expected int ≥ 1", "--training.epochs 0"),
    "no such device": Case(
        "job.toml: [training]: device = 'tpu': torch sees none here; allowed on this machine: auto, cpu",
        "--training.device tpu",
    ),
    # the ranks
    "two shapes": Case(
        "--parallel.groups 2: groups = 2 and group_size = 2: give one of them, not both",
        "--parallel.groups 2 --parallel.group_size 2",
    ),
    "groups do not divide": Case(
        "job.toml: [parallel]: groups = 3 does not divide the 4 ranks of the job; allowed: 1, 2, 4",
        "--parallel.groups 3",
        n=4,
    ),
    "more groups than ranks": Case(
        "job.toml: [parallel]: group_size = 3 is more than the 2 ranks of the job",
        "--parallel.group_size 3",
        n=2,
    ),
    "batch does not divide": Case(
        "job.toml: [data] group_batch_size = 5 is the batch of a group of 2 ranks: give a multiple of 2",
        "--data.group_batch_size 5",
        n=2,
    ),
    "foreign launcher": Case(
        "Open MPI's mpiexec (OMPI_COMM_WORLD_SIZE) started 3 ranks but MPI sees a world of 1: the launcher "
        "does not fit the MPI library (...",
        environment={"OMPI_COMM_WORLD_SIZE": "3"},
    ),
    # names and arguments
    "unknown method": Case(
        "job.toml: [method] name: no 'hierachical'; did you mean 'hierarchical'? Allowed: ...",
        "--method.name hierachical",
    ),
    "unknown argument of a method": Case(
        "job.toml: [method]: hierarchical has no argument 'sync_evry'; did you mean 'sync_every'? Allowed: "
        "grad_reduce, guard, optimizer_state, quantize, sync_every",
        "--method.sync_evry 2",
    ),
    "method out of range": Case(
        "job.toml: [method]: sync_every = 0: groups average after at least 1 step", "--method.sync_every 0"
    ),
    "fraction for a method": Case(
        "job.toml: [method]: hierarchical: sync_every = 2.5: expected int", "--method.sync_every 2.5"
    ),
    "unknown logger": Case(
        "job.toml: [run] loggers: no 'tensorbord'; did you mean 'tensorboard'? Allowed: mlflow, tensorboard, "
        'wandb, or "package.module:function"',
        '--run.loggers ["tensorbord"]',
        n=2,
    ),
    "loggers that are no list": Case(
        "--run.loggers tensorboard: expected a list of strings or tables", "--run.loggers tensorboard"
    ),
    "unknown part": Case(
        "job.toml: [method] grad_reduce: no 'all2all'; did you mean 'alltoall'? "
        + NAMES.format("alltoall, dense, quantized, reduce_scatter, sparse"),
        "--method.grad_reduce all2all",
    ),
    "unknown model": Case(
        f"job.toml: [model] name: no 'mpl'; did you mean 'mlp'? {NAMES.format(MODELS)}", "--model.name mpl"
    ),
    "unknown module": Case(
        "job.toml: [model] name: 'usr:few': no module 'usr', neither installed nor in {folder}",
        "--model.name usr:few",
    ),
    "unknown function": Case(
        "job.toml: [model] name: 'user:feww': no 'feww' in user; did you mean 'few'? Allowed: few, number",
        "--model.name user:feww",
    ),
    "no model": Case(
        "job.toml: [model] name: 'user:number' returned int, expected Module",
        "--model.name user:number --model.arguments {}",
    ),
    "unknown argument of a model": Case(
        "job.toml: [model.arguments]: mlp has no argument 'input'; did you mean 'inputs'? Allowed: classes, "
        "hidden, inputs",
        "--model.arguments.input 3",
    ),
    "unknown argument of a library's model": Case(
        "job.toml: [model.arguments]: GPT2Config has no argument 'n_layers'; did you mean 'n_layer'? ...",
        "--model.name transformers:AutoModelForCausalLM --model.arguments {model_type='gpt2',n_layers=2}",
    ),
    "tokens of images": Case(
        "job.toml: [training] tokens: the samples of this dataset file are not made of tokens",
        "--training.tokens 100",
    ),
    "nothing to compute again": Case(
        "job.toml: [training] activation_checkpointing: the model has no blocks, modules made of others",
        "--training.activation_checkpointing true",
    ),
    "no length": Case(
        "job.toml:12: [training]: no length: give epochs, or steps, samples or tokens in their place",
        changed=("epochs = 1", ""),
    ),
    "unknown optimizer": Case(
        "job.toml: [optimizer] name: no 'Sgd'; did you mean 'SGD'? Allowed: ...", "--optimizer.name Sgd"
    ),
    "optimizer out of range": Case(
        "job.toml: [optimizer.arguments]: SGD: Invalid momentum value: -3",
        "--optimizer.arguments.momentum -3",
    ),
    "learning rate twice": Case(
        "job.toml: [optimizer.arguments]: lr = 3: give it as lr of [optimizer], for one group",
        "--optimizer.arguments.lr 3",
    ),
    "unknown scheduler": Case(
        "job.toml: [lr_schedule] name: no 'Step'; did you mean 'StepLR'? Allowed: ...",
        "--lr_schedule.name Step",
    ),
    "scheduler incomplete": Case(
        "job.toml: [lr_schedule.arguments]: StepLR needs 'step_size'; given: none",
        "--lr_schedule.name StepLR",
    ),
    "unknown transform": Case(
        f"job.toml: [data] transform: no 'crop'; {NAMES.format('crop_and_flip')}", "--data.transform crop"
    ),
    # the data
    "no store": Case(
        "job.toml: [data] path: {folder}/none.h5: no such file; `hpcsgd data convert` makes a dataset file",
        "--data.path none.h5",
    ),
    "other file": Case(
        "job.toml: [data] path: {folder}/job.toml: not a dataset file, or damaged (...",
        "--data.path job.toml",
    ),
    "no scores for some classes": Case(
        "job.toml: [model]: user:few gives scores of shape [2, 4] for 2 samples, but {folder}/small.h5 has "
        "10 classes: expected [2, 10]",
        "--model.name user:few --model.arguments {}",
    ),
    "other shape of samples": Case(
        "job.toml: [model]: mlp does not take samples of shape [1, 6, 6]: mat1 and mat2 ...",
        "--model.arguments.inputs 35",
    ),
    "more workers than any use": Case(
        "job.toml: [data]: num_workers = 1000000: expected at most ...", "--data.num_workers 1000000"
    ),
    # the output
    "folder below a file": Case(
        "user.py/run: cannot be used as [run] output_dir: Not a directory", "--run.output_dir user.py/run"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_line(folder: Path, name: str) -> None:
    case = CASES[name]
    job = folder / "job.toml"
    text = job.read_text()
    assert case.changed[0] in "job.toml" or case.changed[0] in text, "this case changes nothing"
    job.write_text(text.replace(*case.changed))
    file = "none.toml" if case.changed[1] == "none.toml" else "job.toml"
    before = files(folder)
    words = ["train", file, *case.options.split()]
    done = launch(folder, *words, n=case.n, **case.environment)
    assert_one_line(done, case.line.replace("{folder}", str(folder)))
    assert done.out == ""
    assert files(folder) == before


@pytest.mark.slow
def test_every_rank_ends_with_an_error(folder: Path) -> None:
    """The test writes down the exit code of each rank, since that of the launcher is not enough."""
    noting = ["sh", "-c", '"$@"; code=$?; echo $code > code-$PMI_RANK; exit $code', "sh"]
    command = [programs.mpiexec(), "-n", "2", *noting, *hpcsgd("train", "job.toml", "--model.name", "mpl")]
    done = ended(start(folder, command))
    assert_one_line(done, "job.toml: [model] name: no 'mpl'; did you mean 'mlp'? ...")
    assert [(folder / f"code-{rank}").read_text() for rank in range(2)] == ["1\n", "1\n"]


@pytest.mark.slow
def test_of_silent_worlds_the_first_speaks(folder: Path) -> None:
    """A foreign launcher has started three processes, each of which believes that it is alone."""
    ranks = [{"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": str(rank)} for rank in range(3)]
    command = hpcsgd("train", "job.toml")
    worlds = [ended(process) for process in [start(folder, command, **rank) for rank in ranks]]
    assert [world.code for world in worlds] == [1, 1, 1]
    assert [len(world.err.splitlines()) for world in worlds] == [1, 0, 0]


@pytest.mark.slow
def test_fewer_samples_than_ranks(folder: Path) -> None:
    make_store(folder / "three.h5", train=3)
    done = launch(folder, "train", "job.toml", "--data.path", "three.h5", n=4)
    line = "job.toml: [data] path: 3 samples cannot be divided among 4 ranks: each needs at least one"
    assert_one_line(done, line)


@pytest.mark.slow
def test_a_store_that_was_cut_off(folder: Path) -> None:
    whole = (folder / "small.h5").read_bytes()
    (folder / "small.h5").write_bytes(whole[:-1])
    done = launch(folder, "train", "job.toml")
    assert_one_line(done, f"job.toml:2: [data] path: {folder}/small.h5: not a dataset file, or damaged (...")


@pytest.mark.slow
def test_a_store_with_a_damaged_image(folder: Path) -> None:
    path = folder / "small.h5"
    with h5py.File(path) as file:
        images = file["train/x"]
        assert isinstance(images, h5py.Dataset)
        place = images.id.get_chunk_info(7).byte_offset
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    done = launch(folder, "train", "job.toml", "--run.output_dir", "run")
    line = f"{path}: split 'train' is damaged: rows 7 do not match their checksums; convert it again"
    assert_one_line(done, line)
    assert not (folder / "run" / "summary.json").exists()


@pytest.mark.slow
def test_another_kind_of_hdf5_file(folder: Path) -> None:
    with h5py.File(folder / "other.h5", "w") as file:
        file["x"] = [1]
    done = launch(folder, "train", "job.toml", "--data.path", "other.h5")
    line = f"{folder}/other.h5: an HDF5 file, but not a dataset file made by `hpcsgd data convert`"
    assert_one_line(done, f"job.toml: [data] path: {line}")


def test_a_folder_that_holds_a_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").touch()
    before = files(folder)
    done = launch(folder, "train", "job.toml", "--run.output_dir", "run")
    line = "run: holds a run: pass --resume to go on with it, or choose another [run] output_dir"
    assert_one_line(done, line)
    assert files(folder) == before


def test_a_learning_rate_that_breaks_the_model(folder: Path) -> None:
    done = launch(folder, "train", "job.toml", "--optimizer.lr", "1e30", "--run.output_dir", "run")
    assert_one_line(done, "the loss is nan at step 2: try a lower learning rate or a longer warm-up")
    assert not {"summary.json", "model.pt"} & {path.name for path in files(folder)}
    assert not list(folder.glob("run/checkpoints/*"))


def test_an_unknown_command(folder: Path) -> None:
    done = launch(folder, "trian", "job.toml")
    known = "train, probe, measure, plan, simulate, compare, launch, data, ..."
    line = f'Unknown command "trian". Did you mean "train"? Available commands: {known}'
    assert_one_line(done, line)
