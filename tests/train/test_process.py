import sys

import pytest

import programs

FAULTS = """
import platform, resource, torch
from hpcsgd.train.process import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(2**22)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if platform.libc_ver()[0] == "glibc":
    given_back = faults()
    keep_freed_memory()
    faults()
    print(given_back, faults())
"""


@pytest.mark.slow
def test_freed_memory_is_not_faulted_in_again():
    done = programs.run([sys.executable, "-c", FAULTS])
    if not done.stdout:
        pytest.skip("not glibc")
    given_back, kept = map(int, done.stdout.split())
    pages = 10 * 2**24 / 4096
    assert kept < 0.05 * pages < given_back
