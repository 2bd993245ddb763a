"""How many nodes, which method, what it costs: asked of a job file and a machine file beforehand."""
