"""Changes to how Horovod's processes end when others have failed."""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

BROKEN = (
    "a rank whose exchange with a lost one had failed went on to the next, whose messages met others in the "
    "former: they aborted, or waited until Gloo's time limit"
)
TOO_LATE = (
    "a tensor that was handed in while the background thread ended was told of by nobody, and waited for without "
    "limit"
)

ENDING_CHANGES = (
    Replacement(
        "horovod/common/process_set.cc",
        "    while (true) {\n"
        "      InitializeRegisteredAndRemoveMarkedIfReady_(context, status);\n"
        "      if (ProcessSetHasJustBeenRemoved()) {\n",
        "    while (true) {\n"
        "      try {\n"
        "        InitializeRegisteredAndRemoveMarkedIfReady_(context, status);\n"
        "      } catch (const std::exception& ex) {\n"
        "        // Others are gone, so there is nobody left to agree with.\n"
        "        id_to_process_set_[id].Finalize(status);\n"
        "        DeregisterProcessSet(id);\n"
        "        id_to_be_removed_ = SUCCESSFUL_REMOVAL;\n"
        "      }\n"
        "      if (ProcessSetHasJustBeenRemoved()) {\n",
        "ranks agree on the end of their process sets, and where one had failed that raised an exception in the "
        "background thread, which nothing caught: the process was aborted before it could say anything",
    ),
    Replacement(
        "horovod/common/operations.cc",
        "  Status status;\n  try {\n    // process_set is passed here only",
        "  Status status;\n  bool broken = false;\n  try {\n    // process_set is passed here only",
        BROKEN,
    ),
    Replacement(
        "horovod/common/operations.cc",
        '        << "ExecuteOperation Failed";\n    status = Status::UnknownError(ex.what());\n',
        '        << "ExecuteOperation Failed";\n'
        "    status = Status::UnknownError(ex.what());\n"
        "    broken = true;\n",
        BROKEN,
    ),
    Replacement(
        "horovod/common/operations.cc",
        "}\n\n#if HAVE_MPI\nvoid EnrichProcessSetWithMPIController(",
        "  if (broken) {\n"
        "    throw std::runtime_error(status.reason()); // which ends the background thread\n"
        "  }\n"
        "}\n\n#if HAVE_MPI\nvoid EnrichProcessSetWithMPIController(",
        BROKEN,
    ),
    Replacement(
        "horovod/common/operations.cc",
        "    // Reset initialization flag\n",
        "    horovod_global.process_set_table.Get(0).tensor_queue.Open();\n    // Reset initialization flag\n",
        TOO_LATE,
    ),
    Replacement(
        "horovod/common/tensor_queue.h",
        "  void FinalizeTensorQueue(const Status& status);\n",
        "  void FinalizeTensorQueue(const Status& status);\n\n"
        "  // Takes tensors again, after FinalizeTensorQueue.\n"
        "  void Open();\n",
        TOO_LATE,
    ),
    Replacement(
        "horovod/common/tensor_queue.h",
        "  mutable std::mutex mutex_;\n",
        "  mutable std::mutex mutex_;\n\n  // Whether there is nobody any more who looks for messages.\n"
        "  bool closed_ = false;\n",
        TOO_LATE,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "  std::lock_guard<std::mutex> guard(mutex_);\n  if (tensor_table_.find(e.tensor_name)",
        "  std::lock_guard<std::mutex> guard(mutex_);\n"
        "  if (closed_) {\n"
        "    return SHUT_DOWN_ERROR;\n"
        "  }\n"
        "  if (tensor_table_.find(e.tensor_name)",
        TOO_LATE,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "  std::lock_guard<std::mutex> guard(mutex_);\n\n  for (std::size_t i = 0; i < entries.size(); ++i) {\n",
        "  std::lock_guard<std::mutex> guard(mutex_);\n"
        "  if (closed_) {\n"
        "    return SHUT_DOWN_ERROR;\n"
        "  }\n\n"
        "  for (std::size_t i = 0; i < entries.size(); ++i) {\n",
        TOO_LATE,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "  std::lock_guard<std::mutex> guard(mutex_);\n  for (auto& e : tensor_table_) {\n",
        "  std::lock_guard<std::mutex> guard(mutex_);\n  closed_ = true;\n  for (auto& e : tensor_table_) {\n",
        TOO_LATE,
    ),
    Replacement(
        "horovod/common/tensor_queue.cc",
        "// Helper function to get list of allreduced tensor names and total size for\n",
        "void TensorQueue::Open() {\n"
        "  std::lock_guard<std::mutex> guard(mutex_);\n"
        "  closed_ = false;\n"
        "}\n\n"
        "// Helper function to get list of allreduced tensor names and total size for\n",
        TOO_LATE,
    ),
)
