"""Changes without which ranks that are left by others hang in Horovod's elastic mode, and hosts go unnoticed."""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

REGISTRATION = "horovod/runner/elastic/registration.py"
FROZEN = (
    "when a rank was frozen and no other could end it, horovodrun waited for it without limit, and all others for "
    "horovodrun: --elastic-timeout after the first has left a world, who is still in it is given up with its host"
)

ELASTIC_CHANGES = (
    Replacement(
        "horovod/runner/util/remote.py",
        "StrictHostKeyChecking=accept-new'",
        "StrictHostKeyChecking=accept-new -o ServerAliveInterval=20'",
        "horovodrun did not notice that a host was gone, as without power: an ssh that has nothing to send waits "
        "for ever; now it ends after three unanswered questions, a minute",
    ),
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
    Replacement(
        REGISTRATION,
        "                self._workers[state].add(key)\n",
        "                self._workers[state].add(key)\n"
        "                if state != SUCCESS and len(self._states) == 1:\n"
        "                    self._expect_the_others()\n",
        FROZEN,
    ),
    Replacement(
        REGISTRATION,
        "    def _wait(self, key, state, rendezvous_id):\n",
        "    def _expect_the_others(self):\n"
        "        slots = [(host, slot.local_rank)\n"
        "                 for host, its in self._driver.host_assignments.items() for slot in its]\n"
        "        timer = threading.Timer(\n"
        "            self._driver._timeout, self._give_up, (self._rendezvous_id, slots))\n"
        "        timer.daemon = True\n"
        "        timer.start()\n\n"
        "    def _give_up(self, rendezvous_id, slots):\n"
        "        with self._lock:\n"
        "            if rendezvous_id != self._rendezvous_id:\n"
        "                return\n"
        "            late = [slot for slot in slots if slot not in self._states]\n"
        "        # Each waits at the barrier until the last is there.\n"
        "        for slot in late:\n"
        "            threading.Thread(target=self.record_failure, args=slot, daemon=True).start()\n\n"
        "    def _wait(self, key, state, rendezvous_id):\n",
        FROZEN,
    ),
)
