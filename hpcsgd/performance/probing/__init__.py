"""Probes: short trainings that find settings for a long job, such as the number of groups."""
