from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

import programs
from hpcsgd.cli import app, main
from hpcsgd.config.schema import Config, load
from hpcsgd.config.variants import configs
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


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the folder the working directory, and write valid job files."""
    for name in ("job.toml", "bad.toml"):
        (tmp_path / name).write_text(JOB)
    (tmp_path / "m.toml").write_text('[gossip]\nmethod = { name = "sgp" }\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Return the list of calls that commands make to the library, which is replaced by a recorder."""
    heard: list[tuple[object, ...]] = []

    def run(job: Path, read: Callable[[], Config], resume: bool, probe: Path | None) -> None:
        heard.append((job, read(), resume, probe))
        if job.name == "bad.toml":
            raise UserError("bad.toml: is bad")

    def convert(kind: str, source: Path | None, target: Path) -> str:
        heard.append((kind, source, target))
        if kind == "cats":
            raise UserError("no data kind 'cats'")
        return f"{target}: 3 images"

    def convert_text(sources: list[Path], target: Path, tokenizer: str, **options: object) -> str:
        heard.append((sources, target, tokenizer, options))
        return f"{target}: 3 tokens"

    monkeypatch.setitem(sys.modules, "hpcsgd.train", module("hpcsgd.train", run))
    monkeypatch.setitem(sys.modules, "hpcsgd.data", module("hpcsgd.data", convert, convert_text))
    return heard


def module(name: str, *functions: types.FunctionType) -> types.ModuleType:
    made = types.ModuleType(name)
    for function in functions:
        setattr(made, function.__name__, function)
    return made


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("job.toml", (Path("job.toml"), (), False, None)),
        ("job.toml --resume", (Path("job.toml"), (), True, None)),
        ("job.toml --probe probe.json", (Path("job.toml"), (), False, Path("probe.json"))),
        ("--resume job.toml", (Path("job.toml"), (), True, None)),
        ("job.toml --trace", (Path("job.toml"), ("--run.trace_steps", "auto"), False, None)),
        (
            "job.toml --training.epochs 3 --resume --method.sync_every=-4",
            (Path("job.toml"), ("--training.epochs", "3", "--method.sync_every=-4"), True, None),
        ),
    ],
)
def test_train_hands_on_file_overrides_and_resume(
    calls: list[object], words: str, call: tuple[Path, tuple[str, ...], bool, Path | None]
) -> None:
    app(["train", *words.split()])
    job, overrides, resume, probe = call
    assert calls == [(job, load(job, overrides), resume, probe)]


@pytest.mark.parametrize("command", ["train", "probe", "measure"])
def test_the_job_file_is_read_once(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    read_files: list[Path] = []

    def counted(path: Path, overrides: Sequence[str]) -> Config:
        read_files.append(path)
        return load(path, overrides)

    def run(job: Path, read: Callable[[], Config], *_: object, **__: object) -> None:
        assert read() == read() == load(job)

    monkeypatch.setattr(importlib.import_module(f"hpcsgd.cli.{command}"), "load", counted)
    for name in ("hpcsgd.train", "hpcsgd.performance.probing.job_file", "hpcsgd.performance.measuring"):
        monkeypatch.setitem(sys.modules, name, module(name, run))
    app([command, "job.toml"])
    assert read_files == [Path("job.toml")]


def test_train_leaves_user_errors_to_the_hook_of_the_job(calls: list[object]) -> None:
    with pytest.raises(UserError, match=r"^bad\.toml: is bad$"):
        main(["train", "bad.toml"])


def test_compare_hands_on_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[object, ...]] = []

    def run(job: Path, read: Callable[[], Mapping[str, Config]], *given: object) -> None:
        assert read() is read()
        heard.append((job, read(), *given))

    name = "hpcsgd.performance.comparing"
    monkeypatch.setitem(sys.modules, name, module(name, run))
    app(["compare", "job.toml", "--methods", "bsp, hierarchical sync_every=8"])
    app(
        [
            "compare",
            "job.toml",
            "--seed",
            "3",
            "--steps",
            "7",
            "--methods",
            "m.toml",
            "--target",
            "0.9",
            "--resume",
            "--parallel.groups=2",
        ]
    )
    job = Path("job.toml")
    overrides = ("--seed", "3", "--parallel.groups=2", "--training.steps", "7")
    assert heard == [
        (job, configs(job, (), "bsp, hierarchical sync_every=8"), None, False),
        (job, configs(job, overrides, "m.toml"), 0.9, True),
    ]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("digits d.h5", ("digits", None, Path("d.h5"))),
        ("cifar10 cifar.tar.gz c.h5", ("cifar10", Path("cifar.tar.gz"), Path("c.h5"))),
    ],
)
def test_convert_prints_what_was_made(
    calls: list[object], capsys: pytest.CaptureFixture[str], words: str, call: tuple[object, ...]
) -> None:
    app(["data", "convert", *words.split()])
    assert calls == [call]
    assert capsys.readouterr().out == f"{call[2]}: 3 images\n"


def test_convert_text_hands_on_its_files_and_options(
    calls: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    app(["data", "convert", "text", "a.txt", "b", "c.h5", "--tokenizer", "bytes"])
    app(
        [
            "data",
            "convert",
            "text",
            "a",
            "c.h5",
            "--tokenizer",
            "t.json",
            "--test",
            "x",
            "--test",
            "y",
            "--between",
            "|",
            "--end",
            "</s>",
        ]
    )
    none = {"test": (), "between": None, "end": None}
    given = {"test": (Path("x"), Path("y")), "between": "|", "end": "</s>"}
    assert calls == [
        ([Path("a.txt"), Path("b")], Path("c.h5"), "bytes", none),
        ([Path("a")], Path("c.h5"), "t.json", given),
    ]
    assert capsys.readouterr().out == "c.h5: 3 tokens\n" * 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "data convert text a --tokenizer bytes",
            "hpcsgd: data convert text: 1 path given, expected FILES… DST\n",
        ),
        (
            "data convert text a b",
            'hpcsgd: Command "data convert text" parameter --tokenizer requires an argument.\n',
        ),
        ("data convert cats a b", "hpcsgd: no data kind 'cats'\n"),
        ("data convert digits", "hpcsgd: data convert: 0 paths given, expected [SRC] DST\n"),
        ("data convert digits a b c", "hpcsgd: data convert: 3 paths given, expected [SRC] DST\n"),
        (
            "trains job.toml",
            'hpcsgd: Unknown command "trains". Did you mean "train"? '
            "Available commands: train, probe, measure, plan, simulate, compare, launch, data, ...\n",
        ),
        ("train", 'hpcsgd: Command "train" parameter JOB requires an argument.\n'),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(
    calls: list[object], capfd: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 1
    assert capfd.readouterr().err == line


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["simulate", "no\nwhere.toml"], "no where.toml: cannot be read: No such file or directory"),
        (
            ["cite", "job.toml", "--x", "a\n\x1b[2Jb"],
            r"--x a \x1b[2Jb: hpcsgd cite has no such option: Allowed: ",
        ),
        (["a\nb"], 'Unknown command "a b"'),
    ],
)
def test_a_line_is_one_whatever_is_quoted_in_it(
    capfd: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    told = capfd.readouterr().err
    assert told.startswith(f"hpcsgd: {line}")
    assert told.count("\n") == 1


def test_an_interrupt_is_left_to_the_hook_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook ends the other ranks. cyclopts would exit without a message."""

    def run(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "hpcsgd.train", module("hpcsgd.train", run))
    with pytest.raises(KeyboardInterrupt):
        main(["train", "job.toml"])


def test_an_interrupted_conversion_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "hpcsgd.data", module("hpcsgd.data", convert))
    with pytest.raises(SystemExit) as ended:
        main(["data", "convert", "digits", "d.h5"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "hpcsgd: interrupted\n"


def test_doctor_hands_on_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[object, ...]] = []

    def run(*given: object) -> None:
        heard.append(given)

    monkeypatch.setitem(sys.modules, "hpcsgd.cluster.doctor", module("hpcsgd.cluster.doctor", run))
    app(["doctor"])
    app(["doctor", "--group-size", "2", "--data-file", "d.h5"])
    app(["doctor", "--groups", "4"])
    assert heard == [(None, None, None), (None, 2, Path("d.h5")), (4, None, None)]


def test_measure_hands_on_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[object, ...]] = []

    def run(job: Path | None, read: Callable[[], Config] | None, **named: object) -> None:
        heard.append((job, None if read is None else read(), *named.values()))

    name = "hpcsgd.performance.measuring"
    monkeypatch.setitem(sys.modules, name, module(name, run))
    app(["measure"])
    job = Path("job.toml")
    words = "--quick job.toml --out m.toml --data.group_batch_size 4 --max-bytes 8192 --seconds 2"
    app(["measure", *words.split()])
    assert heard == [
        (None, None, Path("machine.toml"), False, None, None),
        (job, load(job, ("--data.group_batch_size", "4")), Path("m.toml"), True, 8192, 2.0),
    ]


def test_simulate_prints_and_writes_what_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples/simulation.toml"
    files = [tmp_path / name for name in ("job.png", "job.json")]
    small = ["--job.groups", "2", "--job.steps", "3", "--job.ranks_per_host", "8"]
    wanted = zip(("--picture", "--json"), map(str, files), strict=True)
    app(["simulate", str(example), *small, *(word for pair in wanted for word in pair)])
    assert capsys.readouterr().out.startswith(
        "job       2 groups of 8 ranks on 2 hosts: all groups wait for each other after every 8 steps\n"
    )
    assert all(file.stat().st_size for file in files)


def test_a_file_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = Path(__file__).parents[2] / "examples/simulation.toml"
    nowhere = str(tmp_path / "nowhere/job.json")
    with pytest.raises(SystemExit) as ended:
        main(["simulate", str(example), "--job.groups", "2", "--job.steps", "3", "--json", nowhere])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"hpcsgd: {nowhere}: cannot be written: No such file or directory\n"
    with pytest.raises(SystemExit):
        main(["simulate", str(example), "--job.groups", "2", "--job.steps", "3", "--json", "/dev/full"])
    assert capsys.readouterr().err == "hpcsgd: /dev/full: cannot be written: No space left on device\n"


@pytest.mark.parametrize("name", ["job.xyz", "job.svg", "job"])
def test_a_picture_of_another_format_is_refused_before_the_scenario_is_read(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "nowhere.toml", "--picture", name])
    assert ended.value.code == 1
    told = f"hpcsgd: --picture {name}: pictures are written as PNG: expected the name of a .png file\n"
    assert capsys.readouterr().err == told


def test_a_mistake_in_a_scenario_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "nowhere.toml"])
    assert ended.value.code == 1
    assert capsys.readouterr().err == "hpcsgd: nowhere.toml: cannot be read: No such file or directory\n"


def test_help_does_not_wait_for_torch() -> None:
    script = "import sys; from hpcsgd.cli import app; app(['--help']); sys.exit('torch' in sys.modules)"
    finished = programs.run([sys.executable, "-c", script])
    assert "train" in finished.stdout


def test_the_package_runs_as_a_module() -> None:
    finished = programs.run([sys.executable, "-m", "hpcsgd", "--help"])
    assert "Usage: hpcsgd COMMAND" in finished.stdout


def test_a_word_that_is_not_utf8_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["report", "run-\udcff"])
    assert end.value.code == 1
    assert capfd.readouterr().err.startswith("hpcsgd: run-\\udcff: not UTF-8: ")
