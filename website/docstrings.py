"""A griffe extension that renames a section of docstrings: griffe's parser expects "Examples:"."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


class AsRead(griffe.Extension):
    """The extension: it replaces the heading "Example:" by "Examples:"."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub("Examples:", obj.docstring.value)
