"""What a run leaves behind for people: its folder, metrics, summary and pictures."""
