"""The papers behind a training, for `hpcsgd cite`."""

from hpcsgd.cli.citing.bibtex import cite

__all__ = ["cite"]
