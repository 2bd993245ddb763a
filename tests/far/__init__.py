"""`far`, a device for tests that makes missing synchronization visible.

Host code cannot access its memory. A thread for each stream does its work later. Memory that is not in use
contains NaN. Its results are those of torch on a CPU.

    device.py    the device as torch's accelerator
    ranks.py     ranks of a test, each on its own device, with delays
    building.py  compiles native/ once for all processes
    native/      queue: streams and events, without torch; memory, pinned: allocation of memory;
                 streams, generator, tensors, operators, renamed: the interfaces that torch needs;
                 waits: the record of the host's waits
"""

from far.device import DEVICES, missing, prepare, switched_on

__all__ = ["DEVICES", "missing", "prepare", "switched_on"]
