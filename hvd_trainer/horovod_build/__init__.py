"""Build a Horovod that fits this PyTorch, and prove it by running it (`install-horovod`).

facts.py, toolchain.py         what this machine has (facts.py: for `doctor`, and about other hosts, too)
build_plan.py                  what to build, and the name under which the wheel is kept
build_steps.py, patch_set.py   fetch, patch, compile
wheel.py                       the cache of built wheels
self_test.py                   two ranks and real collectives
"""
