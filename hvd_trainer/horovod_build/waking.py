"""Changes that let Horovod's background thread sleep until there is something to do.

As published, it looks for work once in a cycle of fixed length, 1 ms: an exchange waits for the next look, and
each look meets those of all other ranks, work or none, on cores that should compute. With
HOROVOD_WAKE_ON_ENQUEUE=1 a tensor that is handed in ends the pause, and the cycle may be long. Nothing changes for
those who do not set it.
"""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

REASON = "with HOROVOD_WAKE_ON_ENQUEUE the background thread wakes when there is work"

WAKING_CHANGES = (
    Replacement(
        "horovod/common/common.h",
        '#define HOROVOD_CYCLE_TIME "HOROVOD_CYCLE_TIME"\n',
        '#define HOROVOD_CYCLE_TIME "HOROVOD_CYCLE_TIME"\n'
        '#define HOROVOD_WAKE_ON_ENQUEUE "HOROVOD_WAKE_ON_ENQUEUE"\n',
        REASON,
    ),
    Replacement(
        "horovod/common/global_state.h",
        "  // Flag indicating whether to prohibit groups from fusing\n",
        "  // Whether a tensor that is handed in ends the pause between two cycles\n"
        "  bool wake_on_enqueue = false;\n\n"
        "  // Flag indicating whether to prohibit groups from fusing\n",
        REASON,
    ),
    Replacement(
        "horovod/common/operations.cc",
        "  // Check if group fusion should be disabled\n",
        "  SetBoolFromEnv(HOROVOD_WAKE_ON_ENQUEUE, state.wake_on_enqueue, true);\n\n"
        "  // Check if group fusion should be disabled\n",
        REASON,
    ),
    Replacement(
        "horovod/common/operations.cc",
        "    std::this_thread::sleep_for(sleep_duration);\n  }\n  state.last_cycle_start",
        "    if (state.wake_on_enqueue) {\n"
        "      state.process_set_table.Get(0).tensor_queue.WaitForMessage(sleep_duration);\n"
        "    } else {\n"
        "      std::this_thread::sleep_for(sleep_duration);\n"
        "    }\n"
        "  }\n  state.last_cycle_start",
        REASON,
    ),
    Replacement(
        "horovod/common/tensor_queue.h",
        "#include <iostream>\n#include <mutex>\n",
        "#include <chrono>\n#include <condition_variable>\n#include <iostream>\n#include <mutex>\n",
        REASON,
    ),
    Replacement(
        "horovod/common/tensor_queue.h",
        "  void FinalizeTensorQueue(const Status& status);\n",
        "  // Returns when a message is queued, or after the limit.\n"
        "  void WaitForMessage(std::chrono::steady_clock::duration limit);\n\n"
        "  void FinalizeTensorQueue(const Status& status);\n",
        REASON,
    ),
    Replacement(
        "horovod/common/tensor_queue.h",
        "  mutable std::mutex mutex_;\n",
        "  mutable std::mutex mutex_;\n\n  // Notified when a message is queued.\n"
        "  std::condition_variable queued_;\n",
        REASON,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "  tensor_table_.emplace(e.tensor_name, std::move(e));\n"
        "  message_queue_.push(std::move(message));\n"
        "  return Status::OK();\n",
        "  tensor_table_.emplace(e.tensor_name, std::move(e));\n"
        "  message_queue_.push(std::move(message));\n"
        "  queued_.notify_one();\n"
        "  return Status::OK();\n",
        REASON,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  return Status::OK();\n",
        "    message_queue_.push(std::move(messages[i]));\n  }\n  queued_.notify_one();\n  return Status::OK();\n",
        REASON,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "// Execute callback for each tensor and clear tensor queue\n",
        "void TensorQueue::WaitForMessage(std::chrono::steady_clock::duration limit) {\n"
        "  std::unique_lock<std::mutex> lock(mutex_);\n"
        "  queued_.wait_for(lock, limit, [this] { return !message_queue_.empty(); });\n"
        "}\n\n"
        "// Execute callback for each tensor and clear tensor queue\n",
        REASON,
    ),
)
