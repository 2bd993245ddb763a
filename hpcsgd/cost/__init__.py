"""Predict the seconds, bytes and node hours of a training, by the α-β model of communication."""
