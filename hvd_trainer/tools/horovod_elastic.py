"""Changes without which ranks that are left by others hang in Horovod's elastic mode, and hosts go unnoticed."""

from __future__ import annotations

from hvd_trainer.tools.horovod_source import Replacement

ELASTIC_CHANGES = (
    Replacement(
        "horovod/common/gloo/gloo_context.cc",
        "  global_ctx = global_context.ctx;\n  timeout_ = global_context.timeout_;\n",
        "  enabled_ = true;\n  global_ctx = global_context.ctx;\n  timeout_ = global_context.timeout_;\n",
        "shutdown left connections open, so that when a rank failed and its neighbours shut down, their own "
        "neighbours waited for them until Gloo's time limit",
    ),
    Replacement(
        "horovod/runner/elastic/driver.py",
        "        self._worker_clients[(host, slot)] = WorkerNotificationClient(\n"
        "            addresses, secret_key, self._verbose)\n",
        "        self._worker_clients[(host, slot)] = WorkerNotificationClient(\n"
        "            addresses, secret_key, self._verbose)\n"
        "        with self._wait_hosts_cond:\n"
        "            hosts = self._host_manager.current_hosts\n"
        "            self._notify_workers_host_changes(hosts, HostUpdateResult.added)\n",
        "hosts that came while the first ranks started were told to nobody, and waited for the next change",
    ),
)
