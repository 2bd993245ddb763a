"""Print the folders and packages of a Python environment as JSON: `PYTHON -P question.py`.

The environment's own interpreter runs this file. It only uses the standard library, because hpcsgd need not
be installed in that environment.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any


def answer() -> dict[str, Any]:
    libraries = {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}),
    }
    return {
        "prefix": sys.prefix,
        "base": sys.base_prefix,
        "executable": os.path.realpath(sys.executable),
        "version": platform.python_version(),
        "standard": sorted(path for path in libraries if os.path.isdir(path)),
        "shared": bool(sysconfig.get_config_var("Py_ENABLE_SHARED")),
        "sites": [path for path in site.getsitepackages([sys.prefix]) if os.path.isdir(path)],
        "path": [path for path in sys.path if os.path.exists(path)],
        "editable": [editable(each) for each in importlib.metadata.distributions() if is_editable(each)],
    }


def is_editable(distribution: importlib.metadata.Distribution) -> bool:
    text = distribution.read_text("direct_url.json")
    return text is not None and json.loads(text).get("dir_info", {}).get("editable", False)


def editable(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    """Return the paths of a distribution's packages and modules, and of the files that refer to them."""
    names = (distribution.read_text("top_level.txt") or "").split()
    found = [importlib.util.find_spec(name) for name in names]
    leads = [
        file for file in distribution.files or () if ".dist-info" not in str(file) and file.parts[0] != ".."
    ]
    return {
        "name": distribution.metadata["Name"],
        "sources": [str(where(spec)) for spec in found if spec is not None],
        "leads": [os.path.abspath(str(distribution.locate_file(file))) for file in leads],
    }


def where(spec: Any) -> Path | None:
    """Return a package's folder, or a module's file."""
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin) if spec.origin else None


if __name__ == "__main__":
    print(json.dumps(answer()))
