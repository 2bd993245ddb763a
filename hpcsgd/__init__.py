"""Training of neural networks on supercomputers with far less communication.

job = hpcsgd.init(groups=4)
loader = DataLoader(data, batch, sampler=hpcsgd.Sampler(data, job))
optimizer = hpcsgd.DistributedOptimizer(optimizer, model, job, method=hpcsgd.hierarchical(every=8))
"""

from hpcsgd.errors import JobError, UserError
from hpcsgd.methods import Method, allreduce_local_sgd, bsp, hierarchical
from hpcsgd.optimizer import DistributedOptimizer
from hpcsgd.topology import Job, init

__version__ = "0.1.0"

__all__ = [
    "DistributedOptimizer", "Job", "JobError", "Method", "UserError", "allreduce_local_sgd", "bsp", "hierarchical",
    "init",
]  # fmt: skip
