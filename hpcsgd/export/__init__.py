"""Out of the door: the averaged model of a run in the formats of others."""

from hpcsgd.export.formats import FORMATS
from hpcsgd.export.write import export

__all__ = ["FORMATS", "export"]
