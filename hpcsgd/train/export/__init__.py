"""Out of the door: the averaged model of a run in the formats of others."""

from hpcsgd.train.export.formats import FORMATS
from hpcsgd.train.export.write import export

__all__ = ["FORMATS", "export"]
