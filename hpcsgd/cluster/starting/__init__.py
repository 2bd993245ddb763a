"""`hpcsgd init`: write a first job file and, in a cluster, ``site.toml``."""

from hpcsgd.cluster.starting.run import begin

__all__ = ["begin"]
