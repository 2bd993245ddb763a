"""Predict what a training costs: seconds, bytes and node hours by the α-β model."""
