"""Starting groups as jobs of their own, on one machine or inside an allocation, and again when they die."""

from hpcsgd.cluster.launch.apart import launch_island
from hpcsgd.cluster.launch.run import launch

__all__ = ["launch", "launch_island"]
