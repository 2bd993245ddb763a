"""Invalid job files and overrides, drawn by a seed: changes of the text, of values and of options."""

from __future__ import annotations

import copy
import datetime
import random
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

import tomli_w

Tables = dict[str, Any]
Place = tuple[str | int, ...]
"""The position of a value: the keys and indices that lead to it through tables and lists."""

STRANGE = (
    "", " ", "é", "\u202e", "𝛿", "名", "🙂", "a" * 5000, "none", "null", "nan", "-", "--", "=", ".", "..",
    "/", "~", "a:b", ":", "os.path:join", "json:loads", "no.such:thing", "user:", "\x00", "a\nb", "%s",
    "{}", "[data]", '"', "\\", "true", "0x10", "1e9", "length", "auto",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**63, 10**40, -(2**63), 0.0, -0.0, 0.5, 1e-300, 1e308, float("inf"),
    float("-inf"), float("nan"),
)  # fmt: skip
OTHERS = (
    True, False, [], [[]], [1, "a"], {}, {"a": 1}, {"name": "bsp"}, {"epoch": 1}, {"name": 3}, {"": {}},
    datetime.date(2020, 2, 29), datetime.datetime(2020, 2, 29, 1, 2, 3), datetime.time(1, 2, 3),
)  # fmt: skip
LETTERS = "aeznr_-. \t\"'[]{}=,#\n\r0159éß\u200b\ufeff\\\x07"


def mutated(text: str, chance: random.Random) -> bytes:
    """Return the job file with one to three changes."""
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        tables = _tables(text)
        if tables is None or chance.random() < 0.3:
            text = chance.choice(TEXTS)(text, chance)
        else:
            chance.choice(VALUES)(tables, chance)
            text = _written(tables) or text
    data = text.encode("utf-8", "surrogatepass")
    return chance.choice(BYTES)(data, chance) if chance.random() < 0.05 else data


def typed(text: str, chance: random.Random) -> list[str]:
    """Return command-line overrides: mostly none, and some of them invalid."""
    if chance.random() < 0.7:
        return []
    tables = _tables(text) or {}
    places = [place for place in _places(tables) if all(isinstance(key, str) for key in place)]
    flag = "--" + ".".join(map(str, chance.choice(places or [("training", "epochs")])))
    value = str(chance.choice((*STRANGE, *NUMBERS, *OTHERS))).replace("\0", "")
    return chance.choice(
        [
            [flag, value], [f"{flag}={value}"], [flag], [flag, value, flag], [f"{flag}.x", value],
            [near(flag, chance).replace("\0", ""), value], ["--", value], ["--.", value], ["--x", value],
            [flag.rpartition(".")[0] or flag, value],
        ]
    )  # fmt: skip


def near(word: str, chance: random.Random) -> str:
    """Return the word with one small typing error, such as a lost, doubled, changed or swapped letter."""
    if not word:
        return chance.choice(LETTERS)
    at = chance.randrange(len(word))
    return chance.choice(
        [
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + chance.choice(LETTERS) + word[at + 1 :],
            word[: at - 1] + word[at : at + 1] + word[at - 1 : at] + word[at + 1 :] if at else word[::-1],
            word.upper(),
        ]
    )


def _tables(text: str) -> Tables | None:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


def _written(tables: Tables) -> str | None:
    """Return the tables as TOML, or None if the TOML writer cannot write them."""
    try:
        return tomli_w.dumps(tables)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError):
        return None


def _places(value: Any, place: Place = ()) -> Iterator[Place]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from _places(inner, (*place, key))


def _at(tables: Any, place: Place) -> Any:
    for key in place:
        tables = tables[key]
    return tables


def _drawn(tables: Tables, chance: random.Random) -> tuple[Any, Any]:
    """Return a table or list that contains a drawn value, and the value's key there."""
    places = list(_places(tables))
    *around, key = chance.choice(places) if places else ("training",)
    return _at(tables, tuple(around)), key


def _replace(tables: Tables, chance: random.Random) -> None:
    around, key = _drawn(tables, chance)
    around[key] = copy.deepcopy(chance.choice(chance.choice([STRANGE, NUMBERS, OTHERS])))


def _spoil(tables: Tables, chance: random.Random) -> None:
    """Replace a value by a similar one, of the same kind or nearly so."""
    around, key = _drawn(tables, chance)
    value = around[key] if isinstance(around, list) or key in around else None
    match value:
        case bool():
            around[key] = not value
        case int() | float():
            around[key] = chance.choice([-value, value + 1, value * 1000, value + 0.5, str(value), [value]])
        case str():
            around[key] = near(value, chance)
        case list():
            around[key] = chance.choice([value[1:], [*value, *value], [value], dict.fromkeys("ab", value)])
        case _:
            around[key] = chance.choice([[value], {"name": value} if value else {}, 1])


def _lose(tables: Tables, chance: random.Random) -> None:
    around, key = _drawn(tables, chance)
    if isinstance(around, list) or key in around:
        del around[key]


def _rename(tables: Tables, chance: random.Random) -> None:
    around, key = _drawn(tables, chance)
    if isinstance(around, dict) and key in around:
        around[near(key, chance)] = around.pop(key)


def _add(tables: Tables, chance: random.Random) -> None:
    around, _ = _drawn(tables, chance)
    if isinstance(around, dict):
        around[chance.choice([*KEYS, *STRANGE])] = copy.deepcopy(
            chance.choice(chance.choice([STRANGE, NUMBERS, OTHERS]))
        )


def _move(tables: Tables, chance: random.Random) -> None:
    """Copy one value to the place of another."""
    (here, key), (there, other) = _drawn(tables, chance), _drawn(tables, chance)
    if (isinstance(here, list) or key in here) and not isinstance(there, list):
        there[other] = copy.deepcopy(here[key])


def _nest(tables: Tables, chance: random.Random) -> None:
    around, key = _drawn(tables, chance)
    value: Any = 1
    for _ in range(chance.choice([3, 30, 150])):
        value = chance.choice([[value], {"name": value}, {"a": value}])
    around[key] = value


KEYS = (
    "graph", "grad_reduce", "outer", "quantize", "optimizer_state", "overlap_steps", "delta", "method",
    "then", "first",
    "at", "device", "partition", "injection", "overlap_share", "fsdp", "groups", "group_size", "precision",
    "compile", "trace_steps", "loggers", "autotune_steps", "fsdp_units", "init_from", "resource",
    "total", "natural_gradient", "steps", "samples", "tokens", "bucket_cap_mb", "transform", "arguments",
    "interval", "scale_with", "channels_last", "activation_checkpointing", "overlap_param_gather",
)  # fmt: skip
VALUES: tuple[Callable[[Tables, random.Random], None], ...] = (
    _replace, _replace, _replace, _spoil, _spoil, _lose, _rename, _add, _add, _move, _nest,
)  # fmt: skip


def _cut_off(text: str, chance: random.Random) -> str:
    return text[: chance.randrange(len(text) + 1)]


def _cut_out(text: str, chance: random.Random) -> str:
    a, b = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    return text[:a] + text[min(b, a + 40) :]


def _put_in(text: str, chance: random.Random) -> str:
    at = chance.randrange(len(text) + 1)
    return text[:at] + chance.choice((*LETTERS, *STRANGE)) + text[at:]


def _lines_anew(text: str, chance: random.Random) -> str:
    """Remove a line, repeat it, or move it."""
    lines = text.splitlines(keepends=True) or [""]
    line = lines.pop(chance.randrange(len(lines)))
    for _ in range(chance.randrange(3)):
        lines.insert(chance.randrange(len(lines) + 1), line)
    return "".join(lines)


TEXTS: tuple[Callable[[str, random.Random], str], ...] = (_cut_off, _cut_out, _put_in, _put_in, _lines_anew)


def _flip(data: bytes, chance: random.Random) -> bytes:
    flipped = bytearray(data or b" ")
    flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    _flip,
    lambda data, _: data.decode().encode("utf-16"),
    lambda data, _: b"\xef\xbb\xbf" + data,
    lambda data, _: data.replace(b"\n", b"\r\n"),
    lambda data, _: data + bytes(range(256)),
    lambda data, _: b"[" * 100_000 + data,
)
