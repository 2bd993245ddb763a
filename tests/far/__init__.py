"""`far`: a device for tests. Host code cannot touch its memory, its work is done later, by a thread for each
stream, and memory that is nobody's holds nothing that looks like a number. What is computed there is what
torch computes on a CPU.

    device.py    the device as torch's accelerator
    ranks.py     ranks of a test, each on a device of its own, under delays
    building.py  native/ compiled, once for all processes
    native/      queue: streams and events, without torch; memory, pinned: who is given what when;
                 streams, generator, tensors, operators, renamed: what torch asks for;
                 waits: those of the host
"""

from far.device import DEVICES, missing, prepare, switched_on

__all__ = ["DEVICES", "missing", "prepare", "switched_on"]
