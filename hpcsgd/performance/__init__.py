"""What predicts and measures: plans, simulations, measurements, probes and comparisons."""
