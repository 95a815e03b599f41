"""Changes to how Horovod's processes end when others have failed, or when they are told to."""

from __future__ import annotations

from hvd_trainer.tools.horovod.source import Replacement

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
        "horovod/runner/common/util/safe_shell_exec.py",
        "    exit_code = executor_shell.wait()\n    if exit_code < 0:\n",
        "    exit_code = executor_shell.wait()\n"
        "    if exit_code == 0 and exit_event.is_set():\n"
        "        # The thread that terminates it may be the one that has learnt its exit code.\n"
        "        exit_code = -signal.SIGTERM\n"
        "    if exit_code < 0:\n",
        "two threads waited for a rank that was terminated, and if the wrong one was first horovodrun took it "
        "for a success, and returned 0 after Ctrl-C",
    ),
)
