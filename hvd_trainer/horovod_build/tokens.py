"""The changes that keep the token of a job, with which Horovod's workers come to its server, out of their logs."""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

_REASON = "the address has the job's token, and a log is read by many"
_ADDRESS = (
    "  auto rendezvous_addr_env = std::getenv(HOROVOD_GLOO_RENDEZVOUS_ADDR);\n"
    "  auto rendezvous_port = GetIntEnvOrDefault(HOROVOD_GLOO_RENDEZVOUS_PORT, -1);\n"
    "  if (rendezvous_addr_env != nullptr) {\n"
    '    LOG(DEBUG) << "rendezvous server address: "'
)


def _address(before: str) -> Replacement:
    old = f"{before}\n\n{_ADDRESS}"
    path = "horovod/common/gloo/gloo_context.cc"
    return Replacement(
        path,
        f"{old} << rendezvous_addr_env;\n",
        f"{old} << std::string(rendezvous_addr_env).substr(0, std::string(rendezvous_addr_env).find('/'));\n",
        _REASON,
    )


def _request(method: str) -> Replacement:
    old = f'  LOG(TRACE) << "Send {method} request to " << '
    return Replacement("horovod/common/gloo/http_store.cc", f"{old}url;\n", f"{old}key;\n", _REASON)


TOKEN_CHANGES = (
    _address("  int cross_size = GetIntEnvOrDefault(HOROVOD_CROSS_SIZE, 1);"),
    _address("  assert(global_context.IsEnabled());"),
    _request("GET"),
    _request("PUT"),
    _request("DELETE"),
)
