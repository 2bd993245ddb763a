"""Tools that predict and measure: plans, simulations, measurements, probes and comparisons."""
