"""A first job file, and in a cluster ``site.toml``: what `hpcsgd init` writes."""

from hpcsgd.cluster.starting.run import begin

__all__ = ["begin"]
