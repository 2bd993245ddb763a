"""The tables of all keys of a job file, generated from hpcsgd/config/schema.py.

Each section of a job file is a dataclass there. The comment on the line of a field explains the key.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Any, get_args, get_type_hints

from hpcsgd.config.kinds import expectation
from hpcsgd.config.reader import BESIDE
from hpcsgd.config.schema import Config

TABLE = "\n| key | type | default | meaning |\n|---|---|---|---|\n"
NEEDED = "*to be given*"
OWN_DEFAULT = re.compile(r"; default: (.*)$")
PAGE = re.compile(r"docs/((\w+)\.md)")


class Unexplained(Exception):
    """A key that no comment explains."""


@dataclass(frozen=True)
class Key:
    name: str
    type: str
    default: str
    meaning: str

    def __str__(self) -> str:
        return f"| {self.name} | {self.type} | {self.default} | {self.meaning} |\n"


def tables(kind: type = Config) -> str:
    return "".join(_section(name, each) for name, each in sections(kind))


def sections(kind: type, name: str = "") -> Iterator[tuple[str, type]]:
    """Yield the name and class of a section and of all sections inside it, in the order of the file."""
    yield name, kind
    for key, inner in get_type_hints(kind).items():
        if dataclasses.is_dataclass(inner):
            assert isinstance(inner, type)
            yield from sections(inner, f"{name}.{key}" if name else key)


def keys(kind: type) -> Iterator[Key]:
    """Yield the keys of one section. Raises `Unexplained` if a key has no comment."""
    told, hints = meanings(kind), get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            continue
        if not told.get(field.name):
            raise Unexplained(f"{kind.__name__}.{field.name}: say what it means in a comment on its line")
        yield _key(field, hints[field.name], told[field.name])


def meanings(kind: type) -> Mapping[str, str]:
    """Return, by the name of a field, the comment at the end of its line."""
    source = inspect.getsource(kind)
    words = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {word.start[0]: word.string.lstrip("# ") for word in words if word.type == tokenize.COMMENT}
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    fields = [node for node in tree.body if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): comments.get(node.end_lineno or 0, "") for node in fields}


def _section(name: str, kind: type) -> str:
    heading = f"\n## [{name}]\n\n{inspect.cleandoc(kind.__doc__ or '')}\n" if name else ""
    rows = "".join(map(str, keys(kind)))
    return heading + TABLE + rows if rows else heading


def _key(field: Field[Any], hint: Any, meaning: str) -> Key:
    own = OWN_DEFAULT.search(meaning)
    meaning = PAGE.sub(r"[\2](\1)", OWN_DEFAULT.sub("", meaning)).replace("|", "\\|")
    if BESIDE in field.metadata:
        return Key("any other", "", "", f"{field.name} {meaning}")
    return Key(f"`{field.name}`", _type(hint), own[1] if own else default(field), meaning)


def _type(hint: Any) -> str:
    choices = get_args(hint)
    if choices and all(isinstance(x, str) for x in choices):
        return ", ".join(f"`{json.dumps(x)}`" for x in choices)
    return expectation(hint)


def default(field: Field[Any]) -> str:
    """Return the default as a job file writes it, or "" if the default is to leave the key out."""
    if field.default is MISSING and field.default_factory is MISSING:
        return NEEDED
    value = field.default_factory() if field.default_factory is not MISSING else field.default
    return "" if value is None or value == {} else f"`{json.dumps(value)}`"
