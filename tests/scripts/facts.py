"""What a script sees of itself and of its process, in FOLDER/RANK.json; it ends in the way asked for."""

import atexit
import inspect
import json
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from types import TracebackType


class Config:
    """An object that a script saves."""


FOLDER, ENDING = Path(sys.argv[1]), sys.argv[2]
events: list[str] = []
facts = {
    "file": __file__,
    "globals": sorted(globals()),
    "name": __name__,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "loader": type(__loader__).__name__,
    "main is this": vars(sys.modules["__main__"]) is globals(),
    "main's file": sys.modules["__main__"].__file__,
    "source": inspect.getsource(Config),
    "argv": sys.argv,
    "path": sys.path,
    "flags": str(sys.flags),
    "unbuffered": sys.stdout.write_through,
    "stdin": sys.stdin.read(),
    "signals": {number.name: str(signal.getsignal(number)).split(" at ")[0] for number in signal.Signals},
    "excepthook": sys.excepthook is sys.__excepthook__,
    "threads": [thread.name for thread in threading.enumerate()],
    "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
    "limits": Path("/proc/self/limits").read_text(),
    "environment": {**os.environ},
    "events": events,
}


def note(event: str) -> None:
    """Use this module as a late saver does, and keep that it could."""
    assert isinstance(pickle.loads(pickle.dumps(Config())), Config)
    events.append(event)
    # Written each time: nobody knows which is the last one.
    (FOLDER / f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))


def late() -> None:
    """Go on when the last line has been run."""
    threading.main_thread().join()
    time.sleep(0.2)
    note("thread")


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show an error that nothing has caught, as a tracker of errors does."""
    note(f"{kind.__name__} in line {trace and trace.tb_lineno}")
    print(f"{kind.__name__}: {error}", file=sys.stderr)


os.chdir("/")
sys.excepthook = tell
facts["file is there"] = Path(__file__).is_file()
atexit.register(note, "first handler")
atexit.register(note, "second handler")
if ENDING != "os._exit":
    threading.Thread(target=late).start()
note("last line")
if ENDING == "raise":
    raise ValueError("planted")
if ENDING == "os._exit":
    os._exit(5)
if ENDING == "text":
    sys.exit("planted")
if ENDING.isdecimal():
    sys.exit(int(ENDING))
