"""The command ``hpcsgd``. Each subcommand is a short file, imported when it runs, as is the code it calls."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from io import TextIOWrapper

from cyclopts import App, CycloptsError

from hpcsgd.cli.user_errors import end_all_ranks, until_nobody_reads
from hpcsgd.cli.words import require_known
from hpcsgd.errors import UserError, require_utf8

app = App(
    name="hpcsgd",
    help="Train PyTorch models on many ranks: groups share a batch and average their models now and then.",
    exit_on_error=False,
    print_error=False,
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # the job's exception hook ends all ranks and reports why
)
app.command(
    "hpcsgd.cli.train:train",
    usage="Usage: hpcsgd train JOB [--resume] [--probe FILE] [--SECTION.KEY VALUE]...",
)
app.command(
    "hpcsgd.cli.probe:probe",
    usage="Usage: hpcsgd probe JOB [--groups 2,4,8] [--repeats N] [--ranks N] [--delta [--steps N]] "
    "[--SECTION.KEY VALUE]...",
)
app.command(
    "hpcsgd.cli.measure:measure",
    usage="Usage: hpcsgd measure [JOB] [--out FILE] [--quick] [--max-bytes N] [--seconds S] "
    "[--SECTION.KEY VALUE]...",
)
app.command(
    "hpcsgd.cli.plan:plan",
    usage="Usage: hpcsgd plan JOB --machine FILE [--probe FILE] [--ranks 64..4096] [--budget NODE-HOURS] "
    "[--deadline HOURS] [--methods bsp,sgp] [--write] [--SECTION.KEY VALUE]...",
)
app.command(
    "hpcsgd.cli.simulate:simulate",
    usage="Usage: hpcsgd simulate SCENARIO [--picture FILE] [--json FILE] [--SECTION.KEY VALUE]...",
)
app.command(
    "hpcsgd.cli.compare:compare",
    usage="Usage: hpcsgd compare JOB --methods METHODS [--steps N | --samples N] [--target VALUE] [--resume] "
    "[--SECTION.KEY VALUE]...",
)
app.command(
    "hpcsgd.cli.launch:launch",
    usage="Usage: hpcsgd launch JOB --groups P [--group-size K] [--resume] [--SECTION.KEY VALUE]...",
)
app.command("hpcsgd.cli.data:data")
app.command(
    "hpcsgd.cli.init:init",
    usage="Usage: hpcsgd init [FILE] [--data NAME] [--model NAME] [--ranks N] [--groups P] ...",
)
app.command("hpcsgd.cli.job:job")
app.command("hpcsgd.cli.cite:cite", usage="Usage: hpcsgd cite JOB [--SECTION.KEY VALUE]...")
app.command(
    "hpcsgd.cli.export:export", usage="Usage: hpcsgd export RUN [--format safetensors|hf|dcp] [--to PATH]"
)
app.command(
    "hpcsgd.cli.report:report", usage="Usage: hpcsgd report RUN... [--to FILE] [--live [--every SECONDS]]"
)
app.command(
    "hpcsgd.cli.doctor:doctor", usage="Usage: hpcsgd doctor [--groups P | --group-size K] [--data-file FILE]"
)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line (or ``words``). After a mistake print one line on stderr and exit with code 1.

    Every rank finds mistakes in the command line before it loads torch and MPI; rank 0 reports them. A
    character that the encoding of stdout lacks, such as × in ASCII, is printed as "?".
    """
    stdout: object = sys.stdout  # a test or a notebook may have another one
    if isinstance(stdout, TextIOWrapper) and stdout.encoding.lower() != "utf-8":  # which lacks none
        stdout.reconfigure(errors="replace")
    with until_nobody_reads():
        _run(sys.argv[1:] if words is None else words)


def _run(words: Sequence[str]) -> None:
    try:
        for word in words:
            require_utf8(word)
        require_known(app, words)
    except UserError as error:
        end_all_ranks(error)
    try:
        app(words)
    except CycloptsError as error:
        end_all_ranks(error)
