"""`install-horovod`: from the published source to a wheel that is proved.

facts.py, nccl.py, toolchain.py -> build_plan.py -> patches.py -> build_steps.py, wheel.py -> self_test.py
"""
