"""Start elastic groups, on one machine or inside an allocation, and restart them when they die."""

from hpcsgd.cluster.launch.replica_group import launch_replica_group
from hpcsgd.cluster.launch.run import launch

__all__ = ["launch", "launch_replica_group"]
