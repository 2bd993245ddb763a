"""`far`: a device for tests, made of memory that host code cannot touch, its work done later; see README.md."""

from far.device import DEVICES, missing, prepare, switched_on

__all__ = ["DEVICES", "missing", "prepare", "switched_on"]
