"""Every Python process of the tests begins here: without most of the garbage collections of a start.

They find nothing, and are a fifth of the time that it takes to import PyTorch.
"""

import gc

gc.set_threshold(100_000, 20, 100)
