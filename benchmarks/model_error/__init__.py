"""Predicted and measured steps."""
