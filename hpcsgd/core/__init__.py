"""What every method is written against: P × K ranks, the model as flat vectors, a step, graphs of groups."""

from hpcsgd.core import graphs

__all__ = ["graphs"]
