"""Starting groups as jobs of their own, on one machine or inside an allocation, and again when they die."""

from hpcsgd.cluster.launch.replica_group import launch_replica_group
from hpcsgd.cluster.launch.run import launch

__all__ = ["launch", "launch_replica_group"]
