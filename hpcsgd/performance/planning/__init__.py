"""Plan a training from a job file and a machine file: number of nodes, method, and predicted cost."""
