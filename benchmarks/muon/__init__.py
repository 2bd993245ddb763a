"""The parts of `muon.py`."""

OWNED, EVERYBODY = "Muon, one owner for each matrix", "Muon, everybody updates everything"
ADAMW = "AdamW"
