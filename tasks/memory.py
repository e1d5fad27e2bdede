"""How much main memory this process has needed."""

import re
import resource
from pathlib import Path


def peak_memory_bytes() -> int:
    """The largest main memory that this process has held.

    The kernel's status file is asked first: `ru_maxrss` begins with the peak of the parent in a child process.
    """
    try:
        text = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
