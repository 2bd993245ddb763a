"""Plan a training from a job file and a machine file: how many nodes, which method, what it costs."""
