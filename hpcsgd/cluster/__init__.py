"""Batch systems and machines: job scripts, packed environments, launchers, and what checks them."""
