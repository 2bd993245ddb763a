"""Variants of a job file, as typed and from a file: what they change, and errors in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcsgd.config.schema import Config
from hpcsgd.config.variants import configs, folder_name, variants
from hpcsgd.errors import UserError

JOB = """
data = { path = "d.h5", group_batch_size = 8 }
model = { name = "mlp" }
optimizer = { lr = 0.1, arguments = { momentum = 0.9 } }
method = { name = "hierarchical", sync_every = 4 }
training = { epochs = 1 }
"""
FILE = """
["two groups"]
parallel.groups = 2

[sparse]
method = { name = "bsp", grad_reduce = { name = "sparse", sparsifier = { name = "deft", density = 0.01 } } }
optimizer.lr = 0.5
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path / "job.toml"


def read(job: Path, text: str, *overrides: str) -> dict[str, Config]:
    return configs(job, overrides, text)


def test_as_typed(job: Path) -> None:
    text = (
        "bsp, hierarchical  sync_every=8 grad_reduce={ name = 'sparse', k = [1, 2] },sgp peers=2 "
        "parallel.groups=4 "
        "optimizer.arguments.momentum=0, "
    )
    found = read(job, text, "--optimizer.lr", "0.2")
    methods = {label: (config.method.name, config.method.arguments) for label, config in found.items()}
    sparse = "hierarchical sync_every=8 grad_reduce={ name = 'sparse', k = [1, 2] }"
    gossip = "sgp peers=2 parallel.groups=4 optimizer.arguments.momentum=0"
    assert methods == {
        "bsp": ("bsp", {}),
        sparse: ("hierarchical", {"sync_every": 8, "grad_reduce": {"name": "sparse", "k": [1, 2]}}),
        gossip: ("sgp", {"peers": 2}),
    }
    assert [config.parallel.groups for config in found.values()] == [None, None, 4]
    assert {config.optimizer.lr for config in found.values()} == {0.2}
    momenta = [config.optimizer.arguments["momentum"] for config in found.values()]
    assert momenta == [0.9, 0.9, 0]


def test_of_a_file(job: Path) -> None:
    file = job.with_name("methods.toml")
    file.write_text(FILE)
    two, sparse = read(job, str(file)).values()
    assert (two.method.name, two.method.arguments, two.parallel.groups) == (
        "hierarchical",
        {"sync_every": 4},
        2,
    )
    grad_reduce = {"name": "sparse", "sparsifier": {"name": "deft", "density": 0.01}}
    assert sparse.method.arguments == {"grad_reduce": grad_reduce}
    assert (sparse.optimizer.lr, sparse.optimizer.arguments) == (0.5, {"momentum": 0.9})


def test_a_typed_key_of_a_table_leaves_the_others(job: Path) -> None:
    words = (
        "--optimizer.arguments",
        "{ momentum = 0.9, weight_decay = 1e-4 }",
        "--parallel.device_backend.inter_group",
        "nccl",
        "--data.arguments.size",
        "3",
    )
    text = "bsp optimizer.arguments.momentum=0 parallel.device_backend.intra_group=mpi, sgp data.arguments={}"
    one, other = read(job, text, *words).values()
    assert one.optimizer.arguments == {"momentum": 0, "weight_decay": 1e-4}
    assert (one.parallel.device_backend.intra_group, one.parallel.device_backend.inter_group) == (
        "mpi",
        "nccl",
    )
    assert (one.data.arguments, other.data.arguments) == ({"size": 3}, {})
    assert other.optimizer.arguments == {"momentum": 0.9, "weight_decay": 1e-4}


def test_a_table_in_a_file_replaces_a_table(job: Path) -> None:
    file = job.with_name("methods.toml")
    file.write_text("[adam]\noptimizer = { name = 'Adam', arguments = { eps = 1e-6 } }\n")
    (adam,) = read(job, str(file)).values()
    assert (adam.optimizer.lr, adam.optimizer.arguments) == (0.1, {"eps": 1e-6})


def test_folders() -> None:
    folders = [folder_name(variant.label) for variant in variants("bsp, m.y:f sync_every=8 x={a = 'b/../c'}")]
    assert folders == ["bsp", "m.y-f-sync_every=8-x=-a-=-b-..-c"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bsp, bsp", "--methods: 'bsp': 'bsp' is there already"),
        ("bsp sync_every=8, bsp  sync_every=8", "'bsp sync_every=8' is there already"),
        (" , ", "--methods: nothing to compare"),
        (
            "bsp sync_every = 8",
            "--methods: 'bsp sync_every = 8': 'sync_every': expected an argument, as sync_every=8",
        ),
        ("bsp 8", "'8': expected an argument, as sync_every=8"),
        ("bsp x={a=1, sgp", "a bracket or a quote has no other end"),
        (
            "bsp run.output_dir=x",
            "cannot change [run]; Allowed: data, lr_schedule, method, optimizer, parallel",
        ),
        ("bsp optimiser.lr=1", "cannot change [optimiser]; did you mean 'optimizer'?"),
        ("bsp parallel.groups=0", "variant 'bsp parallel.groups=0': --parallel.groups 0: expected int ≥ 1"),
        ("bsp parallel.backend=gloo, sgp", "--methods: parallel.backend differs between variants"),
        ("none.toml", "--methods: none.toml: cannot be read"),
        ("bsp", "--method.sync_every: the methods that are compared are those of --methods"),
    ],
)
def test_mistakes(job: Path, text: str, line: str) -> None:
    words = ("--method.sync_every", "3") if text == "bsp" else ()
    with pytest.raises(UserError) as raised:
        read(job, text, *words)
    assert line in str(raised.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bsp = 3", "bsp = 3: expected a table of sections"),
        ("[bsp]\nmethod = 'bsp'", "'bsp': method = 'bsp': expected a section of keys"),
        ("[bsp.method]\nsync_every = 3", "variant 'bsp': {job}: [method] name is missing"),
        ("['?'.method]\nname = 'bsp'", "'?' is no label"),
        ("['a b']\n['a/b']", "'a/b': 'a b' is there already"),
    ],
)
def test_mistakes_in_a_file(job: Path, text: str, line: str) -> None:
    file = job.with_name("methods.toml")
    file.write_text(text)
    with pytest.raises(UserError) as raised:
        read(job, str(file))
    assert line.format(job=job) in str(raised.value)
