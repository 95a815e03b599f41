"""The changes that Horovod 0.28.1's source needs, each with its reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hvd_trainer.horovod_build import messages
from hvd_trainer.horovod_build.bfloat16 import BFLOAT16_CHANGES
from hvd_trainer.horovod_build.elastic import ELASTIC_CHANGES
from hvd_trainer.horovod_build.endings import ENDING_CHANGES
from hvd_trainer.horovod_build.gpu_failures import GPU_FAILURE_CHANGES
from hvd_trainer.horovod_build.interfaces import INTERFACE_CHANGES
from hvd_trainer.horovod_build.security import SECURITY_CHANGES
from hvd_trainer.horovod_build.source import Replacement
from hvd_trainer.horovod_build.stopping import STOPPING_CHANGES
from hvd_trainer.horovod_build.timeline import TIMELINE_CHANGES
from hvd_trainer.horovod_build.tokens import TOKEN_CHANGES
from hvd_trainer.horovod_build.waking import WAKING_CHANGES

# Raised with every change below, so that wheels built before it are not taken for current ones.
PATCH_SET = 16

# Inside the built package: what it was built from and for (see plan.BuildKey).
RECORD_FILE = "horovod/hvd_trainer_build.py"
RECORD_TEMPLATE = '''"""What this Horovod was built for."""

import json

RECORD = json.loads({record!r})
'''


def _built_with(library: str, title: str, answer: str) -> Replacement:
    """horovodrun's question whether Horovod was built with a library, answered from the record."""
    return Replacement(
        "horovod/common/util.py",
        "    for ext_base_name in EXTENSIONS:\n"
        f"        built_fn = lambda ext: ext.{library}_built()\n"
        "        result = _check_extension_lambda(\n"
        f"            ext_base_name, built_fn, 'built with {title}', verbose)\n"
        "        if result is not None:\n"
        "            return result\n"
        "    return None\n",
        f"    from horovod.hvd_trainer_build import RECORD\n    return {answer}\n",
        "horovodrun imported PyTorch in two processes, one after the other, to learn this: seconds per start",
    )


def apply_patches(source: Path, cxx_standard: int, record: Mapping[str, object]) -> None:
    """Changes the unpacked source in place, and adds the messages module and the build's record.

    Args:
        source: the folder with Horovod's setup.py.
        cxx_standard: 17 or 20, as this PyTorch's headers need.
        record: plain values, readable later as `horovod.hvd_trainer_build.RECORD`.

    Raises:
        PatchError: the source is not 0.28.1's.
    """
    for replacement in (
        *compile_changes(cxx_standard),
        *PYTHON_CHANGES,
        *SECURITY_CHANGES,
        *WAKING_CHANGES,
        *INTERFACE_CHANGES,
        *TOKEN_CHANGES,
        *ELASTIC_CHANGES,
        *ENDING_CHANGES,
        *STOPPING_CHANGES,
        *TIMELINE_CHANGES,
        *GPU_FAILURE_CHANGES,
        *BFLOAT16_CHANGES,
    ):
        replacement.apply(source)
    shutil.copyfile(messages.__file__, source / "horovod/runner/elastic/messages.py")
    # JSON in a string, so that null needs no translation.
    text = RECORD_TEMPLATE.format(record=json.dumps(dict(record)))
    (source / RECORD_FILE).write_text(text, encoding="utf-8")


def compile_changes(cxx_standard: int) -> Iterator[Replacement]:
    """What the C++ build needs; the choice of CUDA is read from HOROVOD_GPU_OPERATIONS."""
    newer = f"this PyTorch's headers need C++{cxx_standard}"
    yield Replacement(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD 14)",
        f"set(CMAKE_CXX_STANDARD {cxx_standard})",
        # Here for the bundled gloo, too: gloo as C++14 linked to the rest as C++20 defines
        # gloo::rendezvous::Store::kDefaultTimeout twice.
        f"{newer}, and one standard must hold for all parts",
    )
    yield Replacement(
        "horovod/torch/CMakeLists.txt",
        "    set(CMAKE_CXX_STANDARD 14)",
        f"    set(CMAKE_CXX_STANDARD {cxx_standard})",
        newer,
    )
    yield from CUDA_CHANGES
    yield from PATH_CHANGES
    yield RESTART_CHANGE
    yield from HALF_CHANGES


CUDA_CHANGES = (
    Replacement(
        "CMakeLists.txt",
        "include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        "include(CheckLanguage)\n"
        "if(DEFINED ENV{HOROVOD_GPU_OPERATIONS})\n    check_language(CUDA)\nendif()\n"
        "if(DEFINED ENV{HOROVOD_GPU_OPERATIONS} AND NOT CMAKE_CUDA_COMPILER)\n",
        "a build without CUDA must not use, or fail on, an nvcc that happens to be on PATH",
    ),
    Replacement(
        "cmake/Modules/FindPytorch.cmake",
        '-c "import torch; from torch.utils.cpp_extension import CUDA_HOME; print(True if '
        '((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)"',
        '-c "import os, torch; print(torch.version.cuda is not None and '
        "'HOROVOD_GPU_OPERATIONS' in os.environ)\"",
        "a PyTorch with CUDA and an nvcc on PATH would turn a CPU build into half a CUDA build",
    ),
    Replacement(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        "set(CMAKE_CUDA_STANDARD 17)",
        "the headers of CUDA 13 need C++17",
    ),
    Replacement(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "add_library(compatible_horovod_cuda_kernels cuda_kernels.cu)",
        "add_library(compatible_horovod_cuda_kernels EXCLUDE_FROM_ALL cuda_kernels.cu)",
        "every PyTorch from 2.7 on uses the new C++ ABI: do not compile all kernels twice",
    ),
)

PATH_CHANGES = (
    Replacement(
        "horovod/torch/CMakeLists.txt",
        'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES SUFFIX "${Python_SUFFIX}")',
        'set(HVD_RPATH "\\$ORIGIN/../../torch/lib;\\$ORIGIN/../../nvidia/nccl/lib")\n'
        "foreach(_LIB IN LISTS MPI_LIBRARIES)\n"
        "    get_filename_component(_DIR ${_LIB} DIRECTORY)\n"
        "    list(APPEND HVD_RPATH ${_DIR})\n"
        "endforeach()\n"
        "list(APPEND HVD_RPATH $ENV{HVD_TRAINER_NCCL_FOLDER})\n"
        "set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES\n"
        '    BUILD_WITH_INSTALL_RPATH TRUE INSTALL_RPATH "${HVD_RPATH}")\n'
        'set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES SUFFIX "${Python_SUFFIX}")',
        "a cached wheel must find the PyTorch and NCCL beside it, not those it was built against",
    ),
)

RESTART_CHANGE = Replacement(
    "horovod/common/parameter_manager.cc",
    "  } else {\n    Eigen::VectorXd v = TunableParameter::BestValue();\n",
    "  } else if (fixed_values_.find(variable) == fixed_values_.end()) {\n"
    "    Eigen::VectorXd v = TunableParameter::BestValue();\n",
    "with HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME both set, a second hvd.init() in one process wrote "
    "to an element that is gone, and crashed",
)

HALF = (
    "gloo added half-precision gradients one by one, each through a conversion in software; its AVX code for "
    "them was left out of the bundled build"
)
HALF_CHANGES = (
    Replacement(
        "third_party/gloo/gloo/types.h",
        "    return !(*this == rhs.x);\n",
        "    return x != rhs.x;\n",
        # Found by 1,000,003 random pairs of about 1e4: 68 sums were wrong. PyTorch's gloo had it, too: its issue
        # 152300.
        "it took the other's bits for a number: where that number was the own value, an assignment was left out, "
        "and a sum was one of its summands",
    ),
    Replacement(
        "CMakeLists.txt",
        "    set(CMAKE_POLICY_DEFAULT_CMP0074 NEW)\n    add_subdirectory(third_party/gloo)\n",
        "    set(CMAKE_POLICY_DEFAULT_CMP0074 NEW)\n"
        '    if(HOROVOD_BUILD_ARCH_FLAGS MATCHES "-mf16c" AND HOROVOD_BUILD_ARCH_FLAGS MATCHES "-mavx")\n'
        # The variable writes gloo's config.h. Those who sum do not include it, hence the definition of the same.
        "        set(USE_AVX ON)\n"
        "        add_definitions(-DGLOO_USE_AVX=1)\n"
        "    endif()\n"
        "    add_subdirectory(third_party/gloo)\n",
        HALF,
    ),
    Replacement(
        "third_party/gloo/gloo/CMakeLists.txt",
        '  "${CMAKE_CURRENT_SOURCE_DIR}/gatherv.cc"\n',
        '  "${CMAKE_CURRENT_SOURCE_DIR}/gatherv.cc"\n  "${CMAKE_CURRENT_SOURCE_DIR}/math.cc"\n',
        HALF,
    ),
)

LAST_LINE = "horovodrun said 20 lines more after the ranks' own report of what had happened"
LAST_WORDS = (
    Replacement(
        "horovod/runner/gloo_run.py",
        "            if exit_code != 0:\n                print('Process {idx} exit",
        "            if exit_code != 0 and settings.verbose:\n                print('Process {idx} exit",
        LAST_LINE,
    ),
    Replacement(
        "horovod/runner/gloo_run.py",
        "            if not any(ev.is_set() for ev in all_events):\n",
        "            if settings.verbose and not any(ev.is_set() for ev in all_events):\n",
        LAST_LINE,
    ),
    Replacement(
        "horovod/runner/http/http_server.py",
        "    def should_continue(self):\n",
        "    def handle_error(self, request, client_address):\n"
        "        import sys\n"
        "        if not isinstance(sys.exc_info()[1], ConnectionError):\n"
        "            super().handle_error(request, client_address)\n\n"
        "    def should_continue(self):\n",
        "a rank that ended while its question was being answered left a traceback in horovodrun",
    ),
    Replacement(
        "horovod/runner/launch.py",
        "    _run(args)\n\n\nif __name__",
        "    try:\n"
        "        _run(args)\n"
        "    except RuntimeError as error:\n"
        "        if args.verbose:\n"
        "            raise\n"
        "        sys.exit('horovodrun: ' + ' '.join(str(error).split()))\n"
        "\n\nif __name__",
        LAST_LINE,
    ),
)

PYTHON_CHANGES = (
    _built_with("mpi", "MPI", "RECORD['mpi'] is not None"),
    # The controller that needs no other library: every build of ours has it.
    _built_with("gloo", "Gloo", "True"),
    *LAST_WORDS,
    Replacement(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python 3.12 has no distutils, and horovodrun imports this file",
    ),
    Replacement(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python 3.12 has no distutils",
    ),
    Replacement(
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
        "these are needed to run, not to build, and setuptools would fetch them past pip",
    ),
    Replacement(
        "setup.py",
        "    require_list.append('cffi>=1.4.0')",
        "    pass",
        "nothing in it imports cffi any more, and installing a cached wheel should need no network",
    ),
)
