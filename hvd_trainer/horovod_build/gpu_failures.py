"""Changes to what Horovod does on GPUs when something fails.

NCCL's kernels wait on the GPU for the other ranks, without limit. Only `ncclCommAbort` ends them:

    Python's thread       waits for a handle
    finalizer thread      waits for the kernel, and marks the handle as done
    background thread     notices within a cycle that a rank is gone; its shut-down joins the finalizer

With HOROVOD_NCCL_ABORT=1 that shut-down first aborts the communicators, so that the kernels end, and the finalizer
asks NCCL for errors while it waits. As published, this is so in Horovod's elastic mode only, which also asks
horovodrun for the rank's place.
"""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

OPERATIONS, NCCL = "horovod/common/operations.cc", "horovod/common/ops/nccl_operations"
FINALIZER, CUDA_UTIL = "horovod/common/ops/gpu_operations.cc", "horovod/torch/cuda_util.cc"
ABORT = "with HOROVOD_NCCL_ABORT a rank does not wait on its GPU for one that is gone"
RACE = (
    "the finalizer asked communicators for errors that were aborted meanwhile, and took exchanges that the abort "
    "had ended for done"
)
UNCAUGHT = "a CUDA error, such as a device-side assert, ended the process by SIGABRT, before it could say anything"
DROPPED = (
    "exchanges that the finalizer had not yet looked at were dropped at the end, and waited for without limit"
)

GPU_FAILURE_CHANGES = (
    Replacement(
        CUDA_UTIL,
        '  cudalib = dlopen("libcuda.so", RTLD_LAZY);\n',
        '  cudalib = dlopen("libcuda.so.1", RTLD_LAZY);\n'
        "  if (!cudalib) {\n"
        '    cudalib = dlopen("libcuda.so", RTLD_LAZY);\n'
        "  }\n",
        "libcuda.so comes with the toolkit; containers are given the driver's libcuda.so.1 only",
    ),
    Replacement(
        CUDA_UTIL,
        "    C10_CUDA_CHECK(cudaSetDevice(restore_device_));\n",
        "    // It reports former errors, too, and to throw here ends the process. Who computes next is told.\n"
        "    (void)cudaSetDevice(restore_device_);\n",
        UNCAUGHT,
    ),
    Replacement(
        "horovod/common/common.h",
        '#define HOROVOD_ELASTIC "HOROVOD_ELASTIC"\n',
        '#define HOROVOD_ELASTIC "HOROVOD_ELASTIC"\n#define HOROVOD_NCCL_ABORT "HOROVOD_NCCL_ABORT"\n',
        ABORT,
    ),
    Replacement(
        OPERATIONS,
        "  SetBoolFromEnv(HOROVOD_ELASTIC, cross_nccl_context.elastic, true);\n",
        "  SetBoolFromEnv(HOROVOD_ELASTIC, cross_nccl_context.elastic, true);\n"
        "  for (auto* context : {&nccl_context, &local_nccl_context, &cross_nccl_context}) {\n"
        "    SetBoolFromEnv(HOROVOD_NCCL_ABORT, context->elastic, true);\n"
        "    context->ended = false;\n"
        "  }\n",
        ABORT,
    ),
    Replacement(
        OPERATIONS,
        "  SetBoolFromEnv(HOROVOD_ELASTIC, state.elastic_enabled, true);\n",
        "  SetBoolFromEnv(HOROVOD_ELASTIC, state.elastic_enabled, true);\n"
        "  SetBoolFromEnv(HOROVOD_NCCL_ABORT, state.elastic_enabled, true);\n",
        ABORT,
    ),
    Replacement(
        f"{NCCL}.h",
        "#include <functional>\n",
        "#include <functional>\n#include <mutex>\n",
        RACE,
    ),
    Replacement(
        f"{NCCL}.h",
        "  void ShutDown();\n\n  bool elastic;\n",
        "  void ShutDown();\n\n  bool elastic;\n\n"
        "  // Held while communicators end, and while one is asked for errors.\n"
        "  std::mutex mutex;\n"
        "  bool ended = false;\n",
        RACE,
    ),
    Replacement(
        f"{NCCL}.cc",
        "  if (nccl_result != ncclSuccess) {\n    ncclCommAbort(nccl_comm);\n",
        "  if (nccl_result != ncclSuccess) {\n"
        "    std::lock_guard<std::mutex> guard(mutex);\n"
        "    ended = true;\n"
        "    ncclCommAbort(nccl_comm);\n"
        "    nccl_comm = nullptr;\n",
        RACE,
    ),
    Replacement(
        f"{NCCL}.cc",
        "void NCCLContext::ShutDown() {\n",
        "void NCCLContext::ShutDown() {\n  std::lock_guard<std::mutex> guard(mutex);\n  ended = true;\n",
        RACE,
    ),
    Replacement(
        f"{NCCL}.cc",
        "void NCCLOpContext::AsyncErrorCheck() {\n",
        "void NCCLOpContext::AsyncErrorCheck() {\n"
        "  std::lock_guard<std::mutex> guard(nccl_context_->mutex);\n"
        "  if (nccl_context_->ended) {\n"
        '    throw std::logic_error("the exchange on NCCL was given up: a rank is gone or has failed");\n'
        "  }\n",
        RACE,
    ),
    Replacement(
        "horovod/common/ops/cuda_operations.cc",
        "        std::this_thread::yield();\n      }\n",
        "        std::this_thread::yield();\n"
        "      }\n"
        "      if (error_check_callback) {\n"
        "        error_check_callback(); // an abort ends the kernel, too\n"
        "      }\n",
        RACE,
    ),
    Replacement(
        FINALIZER,
        "        gpu_context->SetDevice(first_entry.device);\n\n"
        "        Event event;\n"
        "        bool gpu_evt_failed = false;\n"
        "        std::string gpu_evt_err_msg;\n",
        "        Event event;\n"
        "        bool gpu_evt_failed = false;\n"
        "        std::string gpu_evt_err_msg;\n"
        "        try {\n"
        "        gpu_context->SetDevice(first_entry.device);\n",
        UNCAUGHT,
    ),
    Replacement(
        FINALIZER,
        "          event = gpu_context->RecordEvent(current_stream);\n        }\n",
        "          event = gpu_context->RecordEvent(current_stream);\n"
        "        }\n"
        "        } catch (const std::exception& ex) {\n"
        "          global_state->shut_down = true; // which the other ranks are told\n"
        "          gpu_evt_failed = true;\n"
        "          gpu_evt_err_msg = ex.what();\n"
        "        }\n",
        UNCAUGHT,
    ),
    Replacement(
        FINALIZER,
        "        if (enable_async_completion) {\n          gpu_context->ReleaseEvent(event);\n        }\n",
        "        if (event.event) {\n"
        "          try {\n"
        "            gpu_context->ReleaseEvent(event);\n"
        "          } catch (const std::exception&) {\n"
        "            // The next exchange meets the same error, and says so.\n"
        "          }\n"
        "        }\n",
        UNCAUGHT,
    ),
    Replacement(
        "horovod/common/thread_pool.cc",
        "  while (running_) {\n",
        "  while (true) {\n",
        DROPPED,
    ),
    Replacement(
        "horovod/common/thread_pool.cc",
        "    if (!running_) break;\n",
        "    if (work_queue_.empty()) break;\n",
        DROPPED,
    ),
)
