"""Predict the seconds, bytes and node hours of a training, by the α-β model of communication.

In this model a message of w bytes takes α + w·β seconds.
"""
