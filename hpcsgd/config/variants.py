"""Variants of one training, to compare: each is the job file with another method or other settings.

On the command line, a variant is a method and its arguments; an argument with a dot is a key of the job file:

    bsp, hierarchical sync_every=8, hierarchical sync_every=8 parallel.groups=2, selsync delta=0.3

A TOML file has a table for each variant, by its label, with sections as in a job file:

    [gossip]
    method = { name = "sgp", graph = { name = "powers_of_two" } }
    parallel.groups = 4
    optimizer.lr = 0.1

[method] replaces the job file's section; in other sections each key replaces the job file's key. So a table
in a section, such as `optimizer.arguments`, is replaced as a whole in a TOML file. On the command line,
`optimizer.arguments.momentum=0` replaces only that key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hpcsgd.config.overrides import first_typed, opened, overlay
from hpcsgd.config.reader import read_toml
from hpcsgd.config.schema import Config, checked, read_tables
from hpcsgd.errors import UserError, located, near_miss

SECTIONS = ("data", "lr_schedule", "method", "optimizer", "parallel")
"""The sections that a variant may change. Seed, model and length are the same for all variants."""


@dataclass(frozen=True)
class Variant:
    """One variant of the job file: its label, and its changes to the file."""

    label: str
    changes: Mapping[str, Any]
    """The sections that replace or extend those of the job file."""

    def laid_over(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of `tables`, those of a job file, with the variant's changes."""
        laid = dict(tables)
        for name, section in self.changes.items():
            before = tables.get(name, {})
            keeps = name != "method" and isinstance(before, Mapping)
            laid[name] = _merged(before, section) if keeps else section
        return laid


def _merged(before: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return `before` with the keys of `section`; tables that come from typed names with dots are merged."""
    merged = {**before, **section}
    for key, value in section.items():
        inner = opened(before.get(key))
        if isinstance(value, Mapping) and isinstance(inner, Mapping) and first_typed(value) is not None:
            merged[key] = _merged(cast("Mapping[str, Any]", inner), cast("Mapping[str, Any]", value))
    return merged


def folder_name(label: str) -> str:
    """Return the name of the folder for the variant with this label."""
    return re.sub(r"[^\w.=+-]+", "-", label).strip("-.")


def variants(text: str) -> list[Variant]:
    """Return the variants that `text` lists, or that the TOML file with this name contains.

    Raises `UserError` for a mistake in a variant, or if there is none.
    """
    with located("--methods"):
        found = _of_file(Path(text)) if text.endswith(".toml") else _typed(text)
        if not found:
            raise UserError(
                "nothing to compare: expected methods, as 'bsp, hierarchical sync_every=8', or a file"
            )
        for variant in found:
            _require_sections(variant)
        _require_apart(found)
    return found


def configs(path: Path, overrides: Sequence[str], methods: str) -> dict[str, Config]:
    """Return the configuration of each variant by its label. All have the job file's run folder.

    Raises `UserError` for a mistake in the job file, in an override or in a variant.
    """
    chosen = variants(methods)
    flag = next((word for word in overrides if re.match(r"--method\b", word)), None)
    if flag is not None and all("method" in variant.changes for variant in chosen):
        raise UserError(f"{flag}: the methods that are compared are those of --methods")
    found: dict[str, Config] = {}
    for variant in chosen:
        with located(f"variant {variant.label!r}"):
            found[variant.label] = checked(variant.laid_over(read_tables(path, overrides)), path)
    if len({config.parallel.backend for config in found.values()}) > 1:
        raise UserError(
            "--methods: parallel.backend differs between variants, but all of them train on the same ranks: "
            "give one for all, after the job file"
        )
    return found


def _of_file(file: Path) -> list[Variant]:
    tables = read_toml(file)
    for label, changes in tables.items():
        if not isinstance(changes, dict):
            raise UserError(f"{file}: {label} = {changes!r}: expected a table of sections")
    return [Variant(label, changes) for label, changes in tables.items()]


def _typed(text: str) -> list[Variant]:
    return [_variant(_cut(entry, " \t\n")) for entry in _cut(text, ",")]


def _variant(words: Sequence[str]) -> Variant:
    name, *arguments = words
    changes: dict[str, Any] = {"method": {"name": name}}
    for word in arguments:
        key, equals, _ = word.partition("=")
        if not (key and equals):
            raise UserError(f"{' '.join(words)!r}: {word!r}: expected an argument, as sync_every=8")
        overlay(changes, [f"--{word}" if "." in key else f"--method.{word}"])
    return Variant(" ".join(words), changes)


def _cut(text: str, at: str) -> list[str]:
    """Split `text` at each of the characters in `at` that is outside brackets and quotes."""
    pieces, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "{[") - (letter in "}]")
        if letter in at and not (depth or quote):
            pieces.append("")
        else:
            pieces[-1] += letter
    if depth or quote:
        raise UserError(f"{text!r}: a bracket or a quote has no other end")
    return [piece.strip() for piece in pieces if piece.strip()]


def _require_sections(variant: Variant) -> None:
    for name, section in variant.changes.items():
        if name not in SECTIONS:
            raise UserError(f"{variant.label!r}: cannot change [{name}]; {near_miss(name, SECTIONS)}")
        if not isinstance(section, Mapping):
            raise UserError(f"{variant.label!r}: {name} = {section!r}: expected a section of keys")


def _require_apart(found: Sequence[Variant]) -> None:
    """Raise `UserError` if two variants would have the same folder."""
    taken: dict[str, str] = {}
    for variant in found:
        folder = folder_name(variant.label)
        if not folder:
            raise UserError(f"{variant.label!r} is no label: letters or digits are needed")
        if folder in taken:
            raise UserError(
                f"{variant.label!r}: {taken[folder]!r} is there already, and labels have to "
                "differ in letters or digits: choose others, in a TOML file"
            )
        taken[folder] = variant.label
