"""The peak of a process's memory."""

import os
import subprocess
import sys

import numpy as np

from tasks.memory import peak_memory_bytes


def test_peak_stays_when_the_memory_is_given_back():
    held = np.ones(200 * 2**20, np.uint8)
    high = peak_memory_bytes()
    assert high >= held.nbytes
    del held
    assert peak_memory_bytes() >= high - 2**20  # the kernel counts pages per processor and sums them up now and then


def test_peak_of_a_child_is_its_own_and_not_its_parents():
    held = np.ones(400 * 2**20, np.uint8)
    script = "from tasks.memory import peak_memory_bytes; import sys; sys.stdout.write(str(peak_memory_bytes()))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ)
    assert held.nbytes < peak_memory_bytes()
    assert int(ended.stdout) < 100 * 2**20
