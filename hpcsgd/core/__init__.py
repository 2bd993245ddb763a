"""What every method is built on: P × K ranks, the model as flat vectors, a step, graphs of groups."""

from hpcsgd.core import graphs

__all__ = ["graphs"]
