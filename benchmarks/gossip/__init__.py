"""The parts of `gossip.py`."""
