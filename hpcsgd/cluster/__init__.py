"""Batch systems and machines: job scripts, packed environments, launchers, and checks of them."""
