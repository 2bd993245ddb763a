"""Export of a run's averaged model to other formats."""

from hpcsgd.train.export.formats import FORMATS
from hpcsgd.train.export.write import export

__all__ = ["FORMATS", "export"]
