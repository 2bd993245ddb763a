"""Check the words of a command line: each flag must be an option of its command or a key of its file.

The error for a mistyped flag suggests options and keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Annotated, Any, get_args, get_type_hints

from cyclopts import App, Parameter

from hpcsgd.config.keys import is_known, keys, meant
from hpcsgd.config.kinds import alternatives_to_none
from hpcsgd.errors import UserError, shortened


@dataclass(frozen=True)
class KeysOf:
    """A mark in a parameter's type: its words are keys of a file, whose dataclass `kind` returns."""

    kind: Callable[[], type]


def _job_file() -> type:
    from hpcsgd.config.schema import Config

    return Config


def _scenario() -> type:
    from hpcsgd.performance.simulation.scenario import Scenario

    return Scenario


JobKeys = Annotated[str, Parameter(allow_leading_hyphen=True), KeysOf(_job_file)]
"""The type of the words on a command line that override keys of a job file."""
ScenarioKeys = Annotated[str, Parameter(allow_leading_hyphen=True), KeysOf(_scenario)]
"""The type of the words on a command line that override keys of a scenario."""


@dataclass(frozen=True)
class _Command:
    """One command: its name, and the options, files and keys that may follow the name."""

    name: str
    takes: dict[str, bool]
    """For each option, without dashes: True if a value follows it."""
    files: int
    """The number of words without a flag, such as the job file, that come before flags and keys."""
    kind: type | None
    """The type of the file whose keys may be typed, or None."""
    numbers: Mapping[str, Any]
    """The types, such as ``int | None``, of the options, without dashes, whose value is a number."""

    @classmethod
    def of(cls, command: App, names: Sequence[str]) -> _Command:
        arguments = command.assemble_argument_collection()
        takes = {
            name.removeprefix("--"): argument.token_count()[0] > 0
            for argument in arguments
            for name in argument.names
            if name.startswith("--")
        }
        first = sum(each.field_info.kind is inspect.Parameter.POSITIONAL_ONLY for each in arguments)
        numbers = {
            name.removeprefix("--"): argument.hint
            for argument in arguments
            for name in argument.names
            if {int, float}.intersection(alternatives_to_none(argument.hint))
        }
        return cls(" ".join(["hpcsgd", *names]), takes, first, _kind(command.default_command), numbers)

    def require(self, words: Sequence[str]) -> None:
        """Raise `UserError` for the first unknown flag, or for a word that should follow a flag.

        A flag is known if it is an option of the command or a key of its file. Raises `UserError`, too, for a
        fraction where a whole number is needed, because cyclopts would round it, and for nan.
        """
        bare = 0
        for flag, text in _split(words, self.takes):
            if flag is None:
                bare += 1
                if self.kind is not None and bare > self.files:
                    raise UserError(f"{text}: expected a flag here: {self._hint(text.lstrip('-'), None)}")
            elif flag not in self.takes:
                self._require_key(flag, text, bare)
            elif flag in self.numbers and text is not None:
                self._require_number(flag, text)

    def _require_number(self, flag: str, text: str) -> None:
        try:
            number = float(text)
        except ValueError:
            return  # cyclopts reports it, or reads it, such as 0x10
        if int in alternatives_to_none(self.numbers[flag]) and not number.is_integer():
            raise UserError(f"--{flag} {shortened(text)}: expected a whole number")
        if isnan(number):
            raise UserError(f"--{flag} {shortened(text)}: expected a number")

    def _require_key(self, flag: str, text: str | None, bare: int) -> None:
        if self.kind is None or not is_known(flag, self.kind):
            given = f"--{flag}" if text is None else f"--{flag} {shortened(text)}"
            if self.kind is not None and "." in flag:
                raise UserError(f"{given}: unknown key: {self._hint(flag, text)}")
            raise UserError(f"{given}: {self.name} has no such option: {self._hint(flag, text)}")
        if text is None:
            inner = [f"--{key}" for key in keys(self.kind) if key.startswith(f"{flag}.")]
            instead = _either([*meant(flag, None, self.takes, {}), *inner[:1]])
            raise UserError(f"--{flag}: expected a value after it{instead and f'; {instead.rstrip()}'}")
        if bare == 0:
            raise UserError(f"--{flag} {shortened(text)}: a key of the file: name the file before it")

    def _hint(self, flag: str, text: str | None) -> str:
        """Return the end of an error: names that `flag` may have meant, and the allowed names."""
        known = {} if self.kind is None else keys(self.kind)
        found = meant(flag, text, self.takes, known) or meant(flag, None, self.takes, known)
        return f"{_either(found)}Allowed: {', '.join(self._allowed(flag, known)) or 'none'}"

    def _allowed(self, flag: str, known: Iterable[str]) -> list[str]:
        """Return the keys of the section that `flag` names, or else all options and sections."""
        section = flag.rpartition(".")[0]
        inside = [f"--{key}" for key in sorted(known) if section and key.rpartition(".")[0] == section]
        if inside or not known:
            return inside or [f"--{name}" for name in sorted(self.takes)]
        example = next(key for key in known if "." in key)
        sections = ", ".join(sorted(key for key in known if "." not in key))
        options = [f"--{name}" for name in sorted(self.takes)]
        return [*options, f"and keys of the file, as --{example}, in {sections}"]


def require_known(app: App, words: Sequence[str]) -> None:
    """Raise `UserError` unless each flag belongs to its command or is a key of the command's file."""
    if any(word in (*app.help_flags, *app.version_flags) for word in words):
        return
    names, apps, rest = app.parse_commands(words)
    if apps[-1].default_command is not None:
        _Command.of(apps[-1], names).require(rest)


def _split(words: Sequence[str], takes: dict[str, bool]) -> Iterator[tuple[str | None, Any]]:
    """Yield (flag, its value or None) for each flag, and (None, word) for each word without a flag."""
    rest = list(words)
    while rest and rest[0] != "--":
        word = rest.pop(0)
        if not word.startswith("--"):
            yield None, word
            continue
        flag, equals, text = word.removeprefix("--").partition("=")
        value: str | None = text if equals else None
        if not equals and takes.get(flag, True) and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        yield flag, value


def _kind(function: Any) -> type | None:
    """Return the dataclass of the file whose keys the command accepts as overrides, or None."""
    if function is None or "overrides" not in inspect.signature(function).parameters:
        return None
    marks = get_args(get_type_hints(function, include_extras=True)["overrides"])
    return next(mark.kind() for mark in marks if isinstance(mark, KeysOf))


def _either(names: Sequence[str]) -> str:
    return f"did you mean {' or '.join(names)}? " if names else ""
