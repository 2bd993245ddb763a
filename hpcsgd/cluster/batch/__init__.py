"""Batch jobs: scripts from the templates in ``jobs/``, checked before they are submitted."""

from hpcsgd.cluster.batch.allocation import Allocation
from hpcsgd.cluster.batch.batch_job import BatchJob, by_hand, estimate, prepare, submit
from hpcsgd.cluster.batch.precheck import (
    Checked,
    check_comparison,
    check_ensemble,
    check_measure,
    check_probe,
    check_replica_groups,
    check_training,
)
from hpcsgd.cluster.batch.site import Site, load_site

__all__ = [
    "Allocation",
    "BatchJob",
    "Checked",
    "Site",
    "by_hand",
    "check_comparison",
    "check_ensemble",
    "check_measure",
    "check_probe",
    "check_replica_groups",
    "check_training",
    "estimate",
    "load_site",
    "prepare",
    "submit",
]
