from __future__ import annotations

import dataclasses
import os
import re
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcsgd.config.schema import (
    Config,
    DataSection,
    DeviceBackendSection,
    LrScheduleSection,
    MethodSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    RunSection,
    TrainingSection,
    dump,
    load,
)
from hpcsgd.errors import UserError

JOB = """\
[data]
path = "digits.h5"
group_batch_size = 64
[model]
name = "mlp"
[optimizer]
lr = 0.1
[method]
name = "hierarchical"
sync_every = 8
[training]
epochs = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder the working directory, so that messages contain short names."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(text: str, *overrides: str) -> Config:
    Path("job.toml").write_text(text)
    return load(Path("job.toml"), overrides)


def test_a_short_file_gets_the_defaults(folder: Path) -> None:
    assert loaded(JOB) == Config(
        data=DataSection(path=folder / "digits.h5", group_batch_size=64),
        model=ModelSection(name="mlp"),
        optimizer=OptimizerSection(lr=0.1),
        method=MethodSection(name="hierarchical", arguments={"sync_every": 8}),
        training=TrainingSection(epochs=3),
        run=RunSection(output_dir=Path("runs/job")),
    )


def test_overrides_are_read_as_the_type_of_their_key(folder: Path) -> None:
    words = """
        --seed 4 --parallel.groups=2 --optimizer.lr 1 --optimizer.name Adam
        --model.name 7 --model.arguments.depth 20
        --method.sync_every 4 --method.mean False --method.chunks [1,2] --run.output_dir 3
        --training.compile True --training.deterministic false
    """
    config = loaded(JOB, *words.split())
    assert (config.seed, config.parallel.groups, config.optimizer.lr) == (4, 2, 1.0)
    assert isinstance(config.optimizer.lr, float)
    assert config.model == ModelSection(name="7", arguments={"depth": 20})
    assert config.method.arguments == {"sync_every": 4, "mean": False, "chunks": [1, 2]}
    assert (config.run.output_dir, config.optimizer.name) == (Path("3"), "Adam")
    assert (config.training.compile, config.training.deterministic) == (True, False)


def test_an_override_can_replace_a_whole_table_and_take_a_choice_back(folder: Path) -> None:
    text = JOB + "[model.arguments]\ndepth = 20\n[parallel]\ngroups = 2\n"
    config = loaded(
        text, "--model.arguments", "{width = 4}", "--parallel.groups", "none", "--parallel.group_size", "4"
    )
    assert config.model.arguments == {"width": 4}
    assert config.parallel == ParallelSection(group_size=4)


def test_braces_are_in_place_of_a_whole_section(folder: Path) -> None:
    text = JOB + "[model.arguments]\ndepth = 20\n"
    config = loaded(
        text,
        "--method",
        '{ name = "selsync", delta = 0.3 }',
        "--model",
        '{ name = "cnn" }',
        "--method.way",
        "x",
    )
    assert (config.method.name, config.method.arguments) == ("selsync", {"delta": 0.3, "way": "x"})
    assert config.model == ModelSection(name="cnn")
    Path("jobs").mkdir()
    Path("jobs/digits.toml").write_text(JOB)
    data = load(Path("jobs/digits.toml"), ["--data", '{ path = "x.h5", group_batch_size = 3 }']).data
    assert (data.path, data.group_batch_size) == (folder / "x.h5", 3)
    with pytest.raises(UserError, match=r"group_batch_size = 'many'|--data.group_batch_size many"):
        load(Path("jobs/digits.toml"), ["--data", '{ path = "x.h5", group_batch_size = "many" }'])


def test_a_typed_table_keeps_the_case_and_the_kind_of_its_strings(folder: Path) -> None:
    config = loaded(
        JOB,
        "--run.loggers",
        '[{ name = "wandb", project = "Mine: True", offline = True }]',
        "--method",
        """{ name = "My:Fn", T_max = TRUE, label = "8", part = { kind = "true", rest = 'Or' } }""",
        "--parallel.device_backend",
        '{ intra_group = "mpi" }',
    )
    assert config.run.loggers == ({"name": "wandb", "project": "Mine: True", "offline": True},)
    arguments = {"T_max": True, "label": "8", "part": {"kind": "true", "rest": "Or"}}
    assert config.method == MethodSection(name="My:Fn", arguments=arguments)
    with pytest.raises(UserError, match=r"^--parallel\.groups none: expected int ≥ 1"):
        loaded(JOB, "--parallel", '{ groups = "none" }')
    with pytest.raises(UserError, match=r"^--training\.epochs 3"):
        loaded(JOB, "--training.epochs", "3\nsteps = 4")


def test_a_path_inside_a_typed_table_starts_here(folder: Path) -> None:
    Path("jobs").mkdir()
    Path("jobs/digits.toml").write_text(JOB)
    typed = '{ path = "x.h5", group_batch_size = 3, arguments = { tokenizer = "t.json" } }'
    data = load(Path("jobs/digits.toml"), ["--data", typed]).data
    assert data.arguments == {"tokenizer": str(folder / "t.json")}


def test_a_backend_is_asked_for_in_the_file_or_over_it(folder: Path) -> None:
    text = JOB + '[parallel]\ndevice_backend = { intra_group = "nccl" }\n'
    assert loaded(text).parallel.device_backend == DeviceBackendSection(
        intra_group="nccl", inter_group="auto"
    )
    assert loaded(
        text, "--parallel.device_backend.inter_group", "mpi"
    ).parallel.device_backend == DeviceBackendSection(intra_group="nccl", inter_group="mpi")


def test_the_store_is_found_from_the_file_or_as_an_override_from_here(folder: Path) -> None:
    Path("jobs").mkdir()
    Path("jobs/digits.toml").write_text(JOB)
    assert load(Path("jobs/digits.toml")).data.path == folder / "jobs" / "digits.h5"
    assert load(Path("jobs/digits.toml"), ["--data.path", "x.h5"]).data.path == folder / "x.h5"
    assert load(Path("jobs/digits.toml")).run.output_dir == Path("runs/digits")


def without(line: str) -> str:
    return JOB.replace(line + "\n", "")


def changed(line: str, other: str) -> str:
    return JOB.replace(line, other)


BAD_FILES = {
    "word for a number": (
        changed("= 3", '= "three"'),
        'job.toml: [training] epochs = "three": expected int ≥ 1',
    ),
    "number for a bool": (
        JOB + "compile = 1\n",
        "job.toml: [training] compile = 1: expected true or false",
    ),
    "bool for a number": (changed("= 3", "= true"), "job.toml: [training] epochs = true: expected int ≥ 1"),
    "fraction for an int": (changed("= 3", "= 3.5"), "job.toml: [training] epochs = 3.5: expected int ≥ 1"),
    "out of range": (changed("= 3", "= 0"), "job.toml: [training] epochs = 0: expected int ≥ 1"),
    "zero excluded": (changed("0.1", "0"), "job.toml: [optimizer] lr = 0: expected number > 0"),
    "infinite": (
        "[parallel]\ntimeout_s = inf\n" + JOB,
        "job.toml: [parallel] timeout_s = Infinity: expected number > 0",
    ),
    "a transport that there is not": (
        JOB + '[parallel]\ndevice_backend = { intra_group = "ncl" }\n',
        "job.toml: [parallel.device_backend] intra_group = \"ncl\": did you mean 'nccl'? "
        "Allowed: auto, gpu_mpi, mpi, nccl",
    ),
    "a transport for nobody": (
        JOB + '[parallel]\ndevice_backend = { intra_groups = "mpi" }\n',
        "[parallel.device_backend] intra_groups = \"mpi\": unknown key: did you mean 'intra_group'? "
        "Allowed: inter_group, intra_group",
    ),
    "a number that no computer counts to": (
        f"seed = {10**30}\n" + JOB,
        f"job.toml: seed = {10**30}: expected int ≥ 0, whole numbers up to 2^63 − 1",
    ),
    "such a number of somebody else's": (
        JOB + f"[model.arguments]\nsizes = [1, {2**63}]\n",
        "job.toml: [model.arguments]: expected a table of keys, whole numbers up to 2^63 − 1",
    ),
    "what is no number among arguments": (
        JOB + "[optimizer.arguments]\nbetas = [0.9, nan]\n",
        "job.toml: [optimizer.arguments]: expected a table of keys, and no nan",
    ),
    "such a number of the method": (
        changed("sync_every = 8", f"sync_every = {2**63}"),
        f"job.toml: [method] sync_every = {2**63}: expected a value, whole numbers up to 2^63 − 1",
    ),
    "a number of thousands of digits": (f"seed = {'9' * 5000}\n" + JOB, "job.toml: not valid TOML: Exceeds"),
    "top key": ("seed = -1\n" + JOB, "job.toml: seed = -1: expected int ≥ 0"),
    "not a table": (JOB + "[model]\n".replace("[model]", "[model.x]"), "[model.x]: unknown section: "),
    "unknown key": (
        changed("epochs", "epoch"),
        "[training] epoch = 3: unknown key: did you mean 'epochs'? Allowed: ",
    ),
    "unknown section": (
        changed("[training]", "[trainings]"),
        "job.toml: [trainings]: unknown section: did you mean 'training'? Allowed: data, lr_schedule, "
        "method, model, optimizer, parallel, rebalance, run, seed, training",
    ),
    "key for a section": (
        "model = 3\n" + without('[model]\nname = "mlp"'),
        "job.toml: model = 3: expected a section",
    ),
    "missing key": (without("lr = 0.1"), "job.toml: [optimizer] lr is missing: expected number > 0"),
    "missing section": (
        without("[training]\nepochs = 3"),
        "job.toml: [training]: no length: give epochs, or steps, samples or tokens in their place",
    ),
    "choice": (
        JOB + '[lr_schedule]\nscaling = "liner"\n',
        "job.toml: [lr_schedule] scaling = \"liner\": did you mean 'linear'? Allowed: linear, none, root",
    ),
    "number for a choice": (JOB + "[lr_schedule]\nscaling = 3\n", "expected one of linear, none, root"),
    "both": (
        JOB + "[parallel]\ngroups = 2\ngroup_size = 4\n",
        "job.toml: [parallel]: groups = 2 and group_size = 4: give one of them, not both",
    ),
    "ignored": (
        JOB + "[lr_schedule.arguments]\nstep_size = 4\n",
        "job.toml: [lr_schedule]: arguments without name",
    ),
    "syntax": (
        JOB + "[parallel\n",
        "job.toml: not valid TOML: Expected ']' at the end of a table declaration (at line 13",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_one_line_naming_file_and_key(folder: Path, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(text)
    assert message in str(caught.value)
    assert str(caught.value).startswith("job.toml: ")
    assert "\n" not in str(caught.value)


BAD_OVERRIDES = {
    "--training.epochs three": "--training.epochs three: expected int ≥ 1",
    "--training.epoch 3": "--training.epoch 3: unknown key: did you mean 'epochs'? Allowed: ",
    "--trainings.epochs 3": "--trainings.epochs 3: unknown section: did you mean 'training'? Allowed: ",
    "--training.epochs.x 3": "--training.epochs.x 3: 'epochs' is a single value",
    "--training 3": "--training 3: expected a section of keys",
    "--lr_schedule.scaling liner": "--lr_schedule.scaling liner: did you mean 'linear'? Allowed: linear",
    "--run.trace_steps often": (
        '--run.trace_steps often: trace_steps = "often": expected steps from 1 on, in order'
    ),
    "--model.arguments 3": "--model.arguments 3: expected a table of keys",
    "--method.delta nan": "--method.delta nan: expected a value, and no nan",
    "--optimizer.arguments.momentum nan": (
        "--optimizer.arguments.momentum nan: expected a table of keys, and no nan"
    ),
    "--optimizer.lr nan": "--optimizer.lr nan: expected number > 0",
    "--training.epochs": "--training.epochs: expected a value after it",
    "--training.epochs --seed 3": "--training.epochs: expected a value after it",
    "epochs=3": "epochs=3: expected an override such as --training.epochs 3",
    "--parallel.groups 2 --parallel.group_size 4": (
        "--parallel.groups 2: groups = 2 and group_size = 4: give one of them"
    ),
}


@pytest.mark.parametrize(("words", "message"), BAD_OVERRIDES.items())
def test_a_bad_override_is_one_line_naming_the_flag(folder: Path, words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(JOB, *words.split())
    assert str(caught.value).startswith(message)


def test_the_largest_whole_number_is_one(folder: Path) -> None:
    assert loaded(JOB, "--seed", str(2**63 - 1)).seed == 2**63 - 1
    with pytest.raises(UserError, match=r"--seed 9{200}: expected int ≥ 0$|left out"):
        loaded(JOB, "--seed", "9" * 5000)


def test_a_file_as_editors_of_windows_write_it(folder: Path) -> None:
    Path("bom.toml").write_text(JOB, encoding="utf-8-sig")
    assert load(Path("bom.toml"), ["--run.output_dir", "runs/job"]) == loaded(JOB)


def test_a_file_that_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^none\.toml: cannot be read: No such file"):
        load(Path("none.toml"))
    Path("latin.toml").write_bytes(b'a = "\xe9"')
    with pytest.raises(UserError, match=r"^latin\.toml: not UTF-8 text: .* at byte 5"):
        load(Path("latin.toml"))


WORDS = st.text(st.characters(codec="utf-8"), min_size=1)
KEYS = st.text(string.ascii_letters + string.digits + "_ .-é", min_size=1)
COUNTS = st.integers(1, 2**40)
AMOUNTS = st.floats(1e-300, 1e300)
LEAVES = (
    st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
TABLES = st.dictionaries(KEYS, VALUES, max_size=3)
CONFIGS = st.builds(
    Config,
    seed=st.integers(0, 2**62),
    parallel=st.builds(ParallelSection, groups=st.none() | COUNTS, timeout_s=AMOUNTS),
    data=st.builds(
        DataSection,
        path=st.just(Path("/stores/x.h5")),
        group_batch_size=COUNTS,
        transform=st.none() | WORDS,
        num_workers=st.integers(0, 64),
    ),
    model=st.builds(ModelSection, name=WORDS, arguments=TABLES),
    optimizer=st.builds(OptimizerSection, name=WORDS, lr=AMOUNTS, arguments=TABLES),
    lr_schedule=st.builds(
        LrScheduleSection,
        scaling=st.sampled_from(["none", "linear", "root"]),
        warmup_epochs=AMOUNTS,
        name=WORDS,
        arguments=TABLES,
    ),
    method=st.builds(MethodSection, name=WORDS, arguments=TABLES.filter(lambda table: "name" not in table)),
    training=st.builds(
        TrainingSection,
        epochs=COUNTS,
        checkpoint_every_steps=st.none() | COUNTS,
        time_limit_s=AMOUNTS,
        precision=st.sampled_from(["fp32", "bf16", "fp16", "bf16_master"]),
        compile=st.booleans(),
    ),
    run=st.just(RunSection(output_dir=Path("runs/elsewhere"))),
)


@given(CONFIGS)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_what_is_dumped_loads_back_equal(tmp_path: Path, config: Config) -> None:
    (tmp_path / "job.toml").write_bytes(dump(config).encode())
    assert load(tmp_path / "job.toml") == config


def test_every_key_of_every_section_survives_the_round_trip(tmp_path: Path) -> None:
    """The property above varies most keys; this one fails where `dump` forgets a new key."""
    given_keys: dict[str, Any] = {
        "groups": 2, "timeout_s": 1.5,
        "device_backend": DeviceBackendSection(intra_group="nccl", inter_group="gpu_mpi"),
    }  # fmt: skip
    config = Config(
        seed=3,
        parallel=ParallelSection(**given_keys),
        data=DataSection(
            path=Path("/x.h5"),
            group_batch_size=2,
            partition={"name": "dirichlet", "alpha": 0.5},
            overlap_share=0.5,
            injection={"alpha": 0.5, "beta": 0.25},
            transform="a:b",
            num_workers=1,
        ),
        model=ModelSection(name="m", arguments={"a": [1, {"b": 2}]}),
        optimizer=OptimizerSection(name="Adam", lr=1e-3, arguments={"betas": [0.9, 0.99]}),
        lr_schedule=LrScheduleSection(
            scaling="root", warmup_epochs=2.0, name="StepLR", arguments={"s": 1}, interval="step"
        ),
        method=MethodSection(name="n", arguments={"sync_every": 2}),
        training=TrainingSection(
            epochs=2,
            log_every=3,
            eval_every_epochs=4,
            checkpoint_every_steps=5,
            time_limit_s=6.0,
            stop_before_end_s=8.0,
            threads=7,
            precision="fp16",
            channels_last=True,
            compile=True,
            deterministic=True,
            bucket_cap_mb=2.0,
            overlap_grad_reduce=False,
            machine=Path("/m"),
        ),
        run=RunSection(output_dir=Path("r")),
    )
    (tmp_path / "job.toml").write_text(dump(config))
    assert dataclasses.asdict(load(tmp_path / "job.toml")) == dataclasses.asdict(config)


def test_a_section_is_not_in_place_of_a_key_that_was_typed_before_it(folder: Path) -> None:
    section = '{ name = "cnn" }'
    told = (
        f"--model {section}: it is in place of all of that section, and so of --model.init_from x.pt, which "
    )
    with pytest.raises(UserError, match=f"^{re.escape(told)}was typed before it: type --model first$"):
        loaded(JOB, "--model.init_from", "x.pt", "--model", section)
    with pytest.raises(UserError, match=r"^--model\.arguments \{a=1\}: it is in place of .* type --model"):
        loaded(JOB, "--model.arguments.depth", "3", "--model.arguments", "{a=1}")
    assert loaded(JOB, "--model", section, "--model.init_from", "x.pt").model.init_from == folder / "x.pt"


def test_a_path_that_is_not_utf8_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path is that of the folder with the job file, which the user has not typed."""
    folder = tmp_path / os.fsdecode(b"n\xff")
    folder.mkdir()
    (folder / "job.toml").write_text(JOB)
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=r"^/.*: not UTF-8: "):
        load(Path("job.toml"))
