"""What papers a training is made of: `hpcsgd cite`."""

from hpcsgd.cli.citing.bibtex import cite

__all__ = ["cite"]
