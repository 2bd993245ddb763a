"""The parts of `sparse_exchange.py`."""
