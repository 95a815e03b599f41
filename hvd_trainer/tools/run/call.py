"""One rank of `horovod.run`: call the function that is in a folder, and write its result there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cloudpickle

from hvd_trainer.launch.world import detect

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.path[:], call = cloudpickle.loads((folder / "call").read_bytes())  # the call may need modules found by it
    function, args, kwargs = cloudpickle.loads(call)
    result = function(*args, **kwargs)
    (folder / str(detect(os.environ).rank)).write_bytes(cloudpickle.dumps(result))
