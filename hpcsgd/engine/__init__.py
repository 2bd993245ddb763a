"""What runs a method: the wrapped optimizer, the gradients' way out, the state that each position owns."""
