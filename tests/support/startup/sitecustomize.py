"""Every Python process of the tests begins here: without most of the garbage collections of a start.

They find nothing, and are a fifth of the time that it takes to import PyTorch. In a warm launch the process does
not import PyTorch at all: see warm_client.py.
"""

import gc
import os
import sys

gc.set_threshold(100_000, 20, 100)
if "HVD_TRAINER_TEST_WARM" in os.environ:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    import warm_client

    del sys.path[0]
    warm_client.hand_over(os.environ["HVD_TRAINER_TEST_WARM"])
if not {"HVD_TRAINER_TEST_PRETEND", "HVD_TRAINER_TEST_FAULT", "HVD_TRAINER_TEST_OWN_HOSTS"}.isdisjoint(os.environ):
    support = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[:0] = [os.path.dirname(support), support]
    import own_host
    import pretend.startup

    own_host.enter()
    pretend.startup.begin()
    del sys.path[:2]
