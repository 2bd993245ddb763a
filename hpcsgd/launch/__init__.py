"""Starting groups as jobs of their own, on one machine or inside an allocation, and again when they die."""

from hpcsgd.launch.apart import launch_island
from hpcsgd.launch.run import launch

__all__ = ["launch", "launch_island"]
