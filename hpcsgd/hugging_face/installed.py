"""A check that packages of Hugging Face are installed, with one line that says how to install them."""

from __future__ import annotations

from importlib.util import find_spec

from hpcsgd.errors import UserError


def require(module: str, *packages: str) -> None:
    """Raise `UserError` if one of `packages`, which `module` needs, is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise UserError(f'{module} needs the package {package}: pip install "hpcsgd[hf]"')
