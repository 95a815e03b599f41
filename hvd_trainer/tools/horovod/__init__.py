"""`install-horovod`: from the published source to a wheel that is proved.

probe.py, nccl.py, toolchain.py -> plan.py -> source.py, patches.py -> steps.py, wheel.py -> proof.py, selftest.py
"""
