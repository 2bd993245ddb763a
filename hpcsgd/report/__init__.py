"""The results of a run for its users: its folder, metrics, summary and pictures."""
