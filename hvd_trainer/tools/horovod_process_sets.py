"""A change without which a rank with process sets is aborted when another one fails."""

from __future__ import annotations

from hvd_trainer.tools.horovod_source import Replacement

PROCESS_SET_CHANGES = (
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
)
