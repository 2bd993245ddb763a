"""The parts that `probe_distances.py` and `probe_vs_accuracy.py` share."""
