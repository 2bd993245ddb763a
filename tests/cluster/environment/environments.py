"""A small virtual environment: a package with a command, and one in an editable installation."""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import programs
from hpcsgd.cluster.environment.contents import SYSTEM


def make(folder: Path) -> Path:
    """Make an environment in `folder`/env; the editable package is in `folder`/src. Return its path."""
    prefix = folder / "env"
    programs.run([sys.executable, "-m", "venv", "--without-pip", prefix])
    site = next(prefix.glob("lib/python*/site-packages"))
    module(site / "plain", "WORD = 'plain'\n\ndef main():\n    print(WORD)\n")
    (site / "again").symlink_to("plain")
    (site / "elsewhere").symlink_to(module(folder / "cache" / "elsewhere", "WORD = 'linked'\n"))
    (prefix / "bin" / "plain").write_text(f"#!{prefix}/bin/python\nimport plain\n\nplain.main()\n")
    (prefix / "bin" / "plain").chmod(0o755)
    in_place(site, "inplace", module(folder / "src" / "inplace", "WORD = 'in place'\n").parent)
    return prefix


def module(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    return folder


def in_place(site: Path, name: str, source: Path, top_level: str | None = None) -> None:
    """Write the files that `pip install -e` writes."""
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (site / f"__editable__.{name}.pth").write_text(f"{source}\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "RECORD").write_text(f"__editable__.{name}.pth,,\n{name}-1.dist-info/RECORD,,\n")
    (info / "direct_url.json").write_text(
        json.dumps({"url": source.as_uri(), "dir_info": {"editable": True}})
    )
    (info / "top_level.txt").write_text(f"{name if top_level is None else top_level}\n")


def of_base() -> tuple[str, ...]:
    """Return the paths of this interpreter and its library: the prefix, unless it is a system's Python."""
    if Path(sys.base_prefix) == SYSTEM:
        return sysconfig.get_path("stdlib"), str(Path(sys.executable).resolve())
    return (sys.base_prefix,)
