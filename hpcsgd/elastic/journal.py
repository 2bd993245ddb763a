"""Where a register is written down, so that the next coordinator goes on where the last one was.

Islands that were started together have a launcher that starts the coordinator again, one after the other: a
file is enough. Of those that were started apart any launcher may begin the next coordinator where it hears
nothing of the last one, which may be alive all the same, behind a network that is broken. So each has a term:

    claim   make the folder n+1, where n is the last one: of several that try, one succeeds
    go on   from the register of the newest term that has one
    tell    write n+1/register.json, then look for n+2: where that is there, nothing is told any more

Whoever claims n+2 reads the registers of before only then. So either it finds what a coordinator was about to
tell, or that one finds the claim, and keeps it to itself: nobody ever hears of a round that the next
coordinator does not know.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hpcsgd.elastic.register import Register
from hpcsgd.errors import UserError
from hpcsgd.files.atomic import overwrite, replacing
from hpcsgd.files.reading import parsed
from hpcsgd.files.shared import names_in, text_of

FOLDER = "coordinators"
"""Of all terms, in the folder of a run whose islands were started apart."""
REGISTER = "register.json"


class Superseded(Exception):
    """There is a later coordinator; this one has nothing more to say."""


class Journal(Protocol):
    """Of one coordinator."""

    def load(self) -> Register:
        """What to go on from."""
        ...

    def write(self, now: Register) -> None:
        """Before anybody hears of it. Raises `Superseded`."""
        ...

    def require_current(self) -> None:
        """Raises `Superseded`."""
        ...


class Alone:
    """A file, of coordinators that come one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Register:
        return written(self._path) or Register()

    def write(self, now: Register) -> None:
        overwrite(self._path, json.dumps(now.to_json()))  # at each round: the disk may take its time

    def require_current(self) -> None:
        pass


class Term:
    """That of the coordinator with this number, of `claim`."""

    def __init__(self, terms: Path, number: int) -> None:
        self._terms, self._number = terms, number
        self.folder = terms / str(number)

    def load(self) -> Register:
        """Who had to leave has left: this coordinator would not hear of it."""
        return replace(newest(self._terms), leaving=False)

    def write(self, now: Register) -> None:
        self._put(now)
        self.require_current()

    def require_current(self) -> None:
        if last_claimed(self._terms) > self._number:
            raise Superseded(f"there is a coordinator after number {self._number}")

    def _put(self, now: Register) -> None:
        """On the disk: others go on from it when this node has crashed."""
        with replacing(self.folder / REGISTER) as part:
            part.write_text(json.dumps(now.to_json()))


def last_claimed(terms: Path) -> int:
    """The number of the newest term; 0 where there is none yet."""
    return max((int(name) for name in names_in(terms) if name.isdecimal()), default=0)


def claim(terms: Path, number: int) -> bool:
    """Whether the term is the caller's, or somebody else was first; `number` is one more than the last."""
    terms.mkdir(exist_ok=True)
    try:
        (terms / str(number)).mkdir()
    except FileExistsError:
        return False
    return True


def newest(terms: Path) -> Register:
    """As it was last written down."""
    for number in range(last_claimed(terms), 0, -1):
        if (register := written(terms / str(number) / REGISTER)) is not None:
            return register
    return Register()


def written(path: Path) -> Register | None:
    """In that file, if it is there."""
    text = text_of(path)
    try:
        return None if text is None else Register.from_json(parsed(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not the register of a run, or damaged: {error}") from error
