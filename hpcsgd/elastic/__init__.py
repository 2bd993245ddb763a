"""Elastic replica groups: separate jobs that may fail and return, connected by a coordinator."""
