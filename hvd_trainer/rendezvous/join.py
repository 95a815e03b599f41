"""The common part of all rendezvous: rank 0 serves a store and publishes its endpoint, the other ranks join it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.launchers import require_variables
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous import store_client
from hvd_trainer.rendezvous.endpoint import Endpoint, create_token, sign_endpoint, verify_endpoint
from hvd_trainer.rendezvous.registry import EndpointRegistry
from hvd_trainer.rendezvous.shared_stores import JobStore

ON_ALL_OR_NONE = (
    "If torch.distributed is initialised on some of them only: call init_process_group on all ranks, or on none."
)
MIN_POLL_S, MAX_POLL_S = 0.02, 1.0
PORT_RELEASE_S = 2.0
"""How long a chosen port may be in use by the server of an earlier job, which ends a moment after that job."""


@dataclass(frozen=True, kw_only=True)
class RendezvousSettings:
    """What a rank needs to know to find the others."""

    world: World
    environ: Mapping[str, str]
    session: str
    """name of the session, the same on all ranks"""
    secret: str | None
    """shared by the ranks, if the user has given them one"""
    address: str | None
    """of this machine, at which rank 0 shall listen; None: that on the route to the others"""
    timeout: timedelta

    def variable(self, name: str) -> str:
        """Return a variable that the launcher must have set.

        Raises:
            LaunchError: it has not.
        """
        require_variables(self.environ, self.world.launcher, name)
        return self.environ[name]


def join_by_registry(registry: EndpointRegistry, settings: RendezvousSettings, address: str) -> JobStore:
    """Serve and publish a store on rank 0; look it up and join it on the others."""
    secret = settings.secret
    if settings.world.is_first:
        token, nonce = create_token(secret)
        endpoint = serve_store(settings.world, address, 0, token)
        registry.publish(sign_endpoint(endpoint, nonce, secret))
    else:
        endpoint = wait_for_server(lambda: _look_up(registry, secret), settings)
    return join_store(endpoint, settings)


def _look_up(registry: EndpointRegistry, secret: str | None) -> Endpoint | None:
    text = registry.lookup()
    return None if text is None else verify_endpoint(text, secret)


def serve_store(world: World, address: str, port: int, token: str | None = None) -> Endpoint:
    """Start the store's server in a process of its own, and return its endpoint.

    Raises:
        LaunchError: the port stays in use, or the address is not of this machine.
    """
    deadline = time.monotonic() + PORT_RELEASE_S
    while True:
        try:
            return store_client.serve(address, port, token=token)
        except OSError as error:
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{world} cannot listen at {address or 'any address'}:{port}: {error.strerror}. If "
                    f"the port is in use, choose another: MASTER_PORT, or torchrun --master-port N."
                ) from error
            time.sleep(MIN_POLL_S)


def join_store(endpoint: Endpoint, settings: RendezvousSettings) -> JobStore:
    """Connect to the store at an endpoint.

    Raises:
        LaunchError: it does not answer in time.
    """
    try:
        return JobStore(store_client.connect(endpoint, settings.timeout), endpoint.host)
    except (dist.DistError, RuntimeError) as error:
        raise LaunchError(
            f"{settings.world} could not reach rank 0 at {endpoint.netloc}: {first_line(error)}. See what rank 0 "
            f"printed: it may have ended; else a firewall may stand between the nodes."
        ) from None


def group_hint() -> str:
    """Return what may be wrong with the group that this rank has joined, as a sentence behind another one."""
    return f" {ON_ALL_OR_NONE}" if dist.is_initialized() else ""


def wait_for_server(find: Callable[[], Endpoint | None], settings: RendezvousSettings) -> Endpoint:
    """Return rank 0's endpoint, once its server answers.

    Args:
        find: returns the endpoint, which may be an earlier job's; None as long as there is none.

    Raises:
        LaunchError: there is none in time.
    """
    start, limit_s = time.monotonic(), settings.timeout.total_seconds()
    while True:
        endpoint = find()
        if endpoint is not None and store_client.is_served(endpoint):
            return endpoint
        waited_s = time.monotonic() - start
        if waited_s > limit_s:
            waited = f"{settings.world} waited {limit_s:.0f} s for rank 0, which"
            raise LaunchError(
                f"{waited} never said where it is. See what rank 0 printed: it may have ended; or it has another "
                f"TMPDIR on this node, or another HVD_TRAINER_SECRET_FILE.{group_hint()}"
                if endpoint is None
                else f"{waited} does not answer at {endpoint.netloc}. See what rank 0 printed: it may have ended. "
                f"Else start all {settings.world.size} ranks, or name rank 0's host by its address in the network "
                f"that they share; and no firewall may stand between the nodes. {ON_ALL_OR_NONE}"
            )
        # Back off: a thousand ranks that poll 50 times per second would slow down the start of rank 0.
        time.sleep(min(MAX_POLL_S, max(MIN_POLL_S, waited_s / 10)))
