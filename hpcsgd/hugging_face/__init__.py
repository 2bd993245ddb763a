"""What `hpcsgd.transformers` and `hpcsgd.accelerate` share; it imports none of the libraries."""
