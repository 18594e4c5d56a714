"""Run a command and print its peak resident kilobytes and its seconds of processor.

Usage: ``python -m benchmarks.launch COMMAND...``.

A process of its own, since a child inherits the peak of the one that forks it.
"""

import resource
import subprocess
import sys

status = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_maxrss, used.ru_utime + used.ru_stime)
sys.exit(status)
