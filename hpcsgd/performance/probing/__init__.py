"""Probes to run before a long job, such as of the number of groups that it can use."""
