"""The parts of `alpha_beta.py`."""
