"""The keys that a TOML file can have, as dotted paths, and suggestions for mistyped keys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, get_origin, get_type_hints

from hpcsgd.config.kinds import alternatives_to_none, convert
from hpcsgd.config.overrides import Typed
from hpcsgd.config.reader import BESIDE, section_kind
from hpcsgd.renamed import RENAMED

CLOSE = 0.6
"""The least similarity, from 0 to 1, between what was typed and a name that is suggested for it."""
AS_CLOSE = 0.1
"""The largest difference in similarity between the best suggestion and another one."""
SHOWN = 3
"""The largest number of suggestions."""


def keys(kind: Any) -> dict[str, Any]:
    """Return the annotations of all keys and sections of the dataclass `kind`, by dotted path."""
    return dict(_keys(kind, ""))


def _keys(kind: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        if BESIDE in field.metadata:
            continue
        path, inner = f"{prefix}{field.name}", section_kind(hints[field.name])
        yield path, hints[field.name]
        if inner is not None:
            yield from _keys(inner, f"{path}.")


def is_known(path: str, kind: Any) -> bool:
    """Return True if a file that the dataclass `kind` describes can have the key `path`.

    Tables without a fixed set of keys, such as [method], can have any key.
    """
    name, _, rest = path.partition(".")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if name not in fields or BESIDE in fields[name].metadata:
        return any(BESIDE in field.metadata for field in fields.values())
    annotation = get_type_hints(kind, include_extras=True)[name]
    inner = section_kind(annotation)
    if not rest or inner is None:
        return not rest or any(get_origin(each) is dict for each in alternatives_to_none(annotation))
    return is_known(rest, inner)


def meant(given: str, text: str | None, flags: Iterable[str], known: Mapping[str, Any]) -> list[str]:
    """Return the flags and the `known` keys that ``--given text`` may have meant, likeliest first.

    The last part of a key, or an earlier name of it, is enough to find it. Keys that cannot have the value
    `text` are left out.
    """
    names = _with_new_names(given)
    scores = {f"--{flag}": max(_likeness(name, flag) for name in names) for flag in flags}
    for path, annotation in known.items():
        if text is None or _takes(annotation, f"--{path}", text):
            scores[f"--{path}"] = max(_likeness_to_key(name, path) for name in names)
    best = max(scores.values(), default=0.0)
    close = [name for name, score in scores.items() if score >= max(CLOSE, best - AS_CLOSE)]
    return sorted(close, key=lambda name: -scores[name])[:SHOWN]


def _with_new_names(given: str) -> list[str]:
    """Return `given`, and variants in which parts that were renamed have their new names."""
    parts = [(part, *RENAMED.get(part.replace("-", "_"), ())) for part in given.split(".")]
    return [".".join(names) for names in itertools.product(*parts)]


def _likeness(given: str, name: str) -> float:
    one, other = (word.lower().replace("-", "_") for word in (given, name))
    return SequenceMatcher(None, one, other).ratio()


def _likeness_to_key(given: str, path: str) -> float:
    """Return the similarity of `given` to the key `path`. Its section may be missing or wrong in `given`."""
    last = path.rpartition(".")[2]
    of_last = 0.9 * _likeness(given.rpartition(".")[2], last) if "." in given else _likeness(given, last)
    return max(_likeness(given, path), of_last)


def _takes(annotation: Any, flag: str, text: str) -> bool:
    if section_kind(annotation) is not None:
        return isinstance(Typed(flag, text).value(), dict)
    try:
        convert(annotation, Typed(flag, text))
    except ValueError:
        return False
    return True
