"""Probes: short trainings before a long job, such as to find the number of groups that it can use."""
