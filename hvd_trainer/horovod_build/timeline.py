"""A change that lets the thread sleep that writes Horovod's timeline.

As published, it looks for something to write without a pause from Horovod's start to its end, and takes a lock for
each look: a core is busy with it, and where all have something to do, training is slower.
"""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

TIMELINE_CHANGES = (
    Replacement(
        "horovod/common/timeline.cc",
        "    // Allow scheduler to schedule other work for this core.\n    std::this_thread::yield();\n",
        "    // Nothing to write: the queue has room for a million records meanwhile.\n"
        "    std::this_thread::sleep_for(std::chrono::milliseconds(1));\n",
        "the timeline's writer took a core for itself, from Horovod's start to its end",
    ),
)
