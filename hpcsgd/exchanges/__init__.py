"""Exchanges that several methods share."""

from hpcsgd.exchanges.dense import AcrossGroups, AllReduce, AllToAll, Gathered, ReduceScatter

__all__ = ["AcrossGroups", "AllReduce", "AllToAll", "Gathered", "ReduceScatter"]
