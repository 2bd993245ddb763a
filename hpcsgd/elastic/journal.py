"""The files in which the register is saved, so that the next coordinator continues from it.

If replica groups were started together, their launcher restarts the coordinator, and one file is enough. If
they were started separately, any launcher may start the next coordinator when it hears nothing of the last
one, which may still be alive behind a broken network. So each coordinator has a term with a number. Let n be
the number of the last term:

    claim      make the folder n+1; if several processes try, one succeeds and becomes the next coordinator
    continue   read the register of the newest term that has saved one
    publish    before a register is sent: write n+1/register.json, then look for the folder n+2; if it exists,
               send nothing any more

The coordinator that claims n+2 reads the register of n+1 only after that. So either it finds what coordinator
n+1 is about to send, or coordinator n+1 finds the claim and sends nothing. Ranks never learn of a round that
the next coordinator does not know.
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
"""The folder of all terms, in the folder of a run whose replica groups were started separately."""
REGISTER = "register.json"


class Superseded(Exception):
    """The error if there is a later coordinator, so that this one must not send anything more."""


class Journal(Protocol):
    """The place in which a coordinator saves the register, and finds that of the coordinator before."""

    def load(self) -> Register:
        """Return the last saved register, from which this coordinator continues, or an initial one."""
        ...

    def write(self, now: Register) -> None:
        """Save the register `now` before it is sent. Raises `Superseded` if there is a later coordinator."""
        ...

    def require_current(self) -> None:
        """Raise `Superseded` if there is a later coordinator."""
        ...


class FileJournal:
    """The journal of a launcher that restarts its own coordinator, so that only one runs: a single file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Register:
        return written(self._path) or Register()

    def write(self, now: Register) -> None:
        overwrite(self._path, json.dumps(now.to_json()))  # no fsync: it would slow down every round

    def require_current(self) -> None:
        pass


class TermJournal:
    """The journal of the coordinator that claimed the term `number` in the folder `terms`."""

    def __init__(self, terms: Path, number: int) -> None:
        self._terms, self._number = terms, number
        self.folder = terms / str(number)

    def load(self) -> Register:
        """Return the newest register, with `leaving` = False because groups that had to stop have left."""
        return replace(newest(self._terms), leaving=False)

    def write(self, now: Register) -> None:
        self._put(now)
        self.require_current()

    def require_current(self) -> None:
        if last_claimed(self._terms) > self._number:
            raise Superseded(f"there is a coordinator after number {self._number}")

    def _put(self, now: Register) -> None:
        """Write the register with fsync, because other nodes continue from it if this node crashes."""
        with replacing(self.folder / REGISTER) as part:
            part.write_text(json.dumps(now.to_json()))


def last_claimed(terms: Path) -> int:
    """Return the number of the newest term; 0 if there is none."""
    return max((int(name) for name in names_in(terms) if name.isdecimal()), default=0)


def claim(terms: Path, number: int) -> bool:
    """Claim the term `number`, the last one plus 1; return False if another process was first."""
    terms.mkdir(exist_ok=True)
    try:
        (terms / str(number)).mkdir()
    except FileExistsError:
        return False
    return True


def newest(terms: Path) -> Register:
    """Return the newest register that was saved in the folder `terms`, or an initial one."""
    for number in range(last_claimed(terms), 0, -1):
        if (register := written(terms / str(number) / REGISTER)) is not None:
            return register
    return Register()


def written(path: Path) -> Register | None:
    """Return the register in the file `path`, or None if there is no file."""
    text = text_of(path)
    try:
        return None if text is None else Register.from_json(parsed(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not the register of a run, or damaged: {error}") from error
