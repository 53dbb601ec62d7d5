"""A driver that kills itself, as kill -9 does, when a task of a given phase and iteration begins or ends.

``python killing_driver.py SETTINGS PHASE ITERATION STATE``, STATE being Dask's: "processing" or "memory".
"""

from __future__ import annotations

import sys

from kills import KillDriver, client_of
from spotlight.run import Run

if __name__ == "__main__":
    settings, phase, iteration, state = sys.argv[1:]
    run = Run(settings).start()
    client_of(run).register_plugin(KillDriver(f"{phase}-{iteration}", state))
    run.wait()
