"""Elastic replica groups: jobs of their own that may fail and return, connected by a coordinator."""
