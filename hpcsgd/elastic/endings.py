"""How a replica group stops training before its own end, as exceptions.

Every training knows them. Only trainings of replica groups load the rest of `hpcsgd.elastic`.
"""


class Over(Exception):
    """The error if the other replica groups have finished the training and saved it."""


class Relocated(Exception):
    """The signal that this replica group has to be started again, with another number of ranks."""
