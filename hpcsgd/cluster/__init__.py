"""Work with clusters: scripts for batch systems, packed environments, launchers, and checks."""
