"""The papers' results as constants, and comparisons of ours with them, in one module per paper."""
