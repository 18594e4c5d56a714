"""Run a command and print its peak resident kilobytes: ``python -m benchmarks.launch COMMAND...``.

A process of its own, since a child inherits the peak of the one that forks it.
"""

import resource
import subprocess
import sys

status = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(status)
