"""Find the papers on which a training is based, for `hpcsgd cite`."""

from hpcsgd.cli.citing.bibtex import cite

__all__ = ["cite"]
