"""Files that are whole or not there: replaced at once, or HDF5 with checksums."""
