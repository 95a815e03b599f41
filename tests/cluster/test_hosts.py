"""Several hosts, each with its own address, processes and ssh server, and real launchers on them."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import digits_job
import documents
import process_tree
import pytest
import waiting
import warm
from child_environment import child_environment
from combinations import case
from launchers import HOROVODRUN, QUICKEST, SUPPORT, launch, requires
from records import lines

from benchmarks.hosts import Cluster, Host, hosts

JOB = str(SUPPORT / "hosts_job.py")
OPTIONS = ("--epochs", "2", "--batch-size", "32", "--quiet")
PORTS = itertools.count(29611)
"""Ports for the rendezvous of torchrun and mpirun, one for each job."""
pytestmark = [requires("hosts"), pytest.mark.warm]
LAUNCHERS = [case(name) for name in ("horovodrun", "torchrun", "mpirun")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hosts("hosta", "hostb", "hostc", networks=2) as made:
        yield made


@pytest.fixture
def shared(cluster: Cluster) -> Path:
    """Return a folder that all hosts see, without what they had of the last test."""
    for host in cluster:
        host.run(["rm", "-f", "/tmp/fetched"])
    return cluster.new_folder()


def commands(
    launcher: str, cluster: Sequence[Host], argv: Sequence[str], each: int
) -> list[tuple[Host, list[str]]]:
    """Return what is typed on which host for so many ranks on each."""
    first, number, port = cluster[0], str(each * len(cluster)), str(next(PORTS))
    slots = ",".join(f"{host.name}:{each}" for host in cluster)
    if launcher == "horovodrun":
        words = [str(HOROVODRUN), "-np", number, "-H", slots, sys.executable]
        return [(first, [*words, *argv])]
    if launcher == "mpirun":
        where = ["-x", f"MASTER_ADDR={first.name}", "-x", f"MASTER_PORT={port}", "-x", "HOME"]
        where += [word for name in ("PYTHONPATH", *warm.variables()) for word in ("-x", name)]
        words = ["mpirun", "--allow-run-as-root", "-np", number, "-H", slots, *where, sys.executable]
        return [(first, [*words, *argv])]
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(each)]
    where = ["--nnodes", str(len(cluster)), "--master-addr", first.name, "--master-port", port]
    return [(host, [*run, "--node-rank", str(place), *where, *argv]) for place, host in enumerate(cluster)]


def started(
    launcher: str, cluster: Sequence[Host], argv: Sequence[str], folder: Path, each: int = 2
) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """Start the launchers with so many ranks on each host."""
    return typed(commands(launcher, cluster, argv, each), cluster, folder)


@contextmanager
def typed(
    commands: Sequence[tuple[Host, list[str]]],
    cluster: Sequence[Host],
    folder: Path,
    environs: Sequence[Mapping[str, str | None]] = (),
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start commands on hosts; at the end of the block they and all that is left on the hosts are killed.

    Args:
        environs: variables of each command.
    """
    with ExitStack() as stack:
        running = []
        for (host, words), variables in itertools.zip_longest(commands, environs, fillvalue={}):
            output = stack.enter_context((folder / f"output-{host.name}").open("wb"))
            environ = child_environment(
                host.environ,
                warm.variables() | dict(variables),
                mark=os.environ[process_tree.MARK],
                folder=Path("/tmp"),
            )
            popen = subprocess.Popen(
                host.command(words), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ
            )
            running.append(popen)
            stack.callback(popen.wait)
            stack.callback(popen.kill)
        try:
            yield running
        finally:
            for host in cluster:
                host.end_all()


def output(folder: Path) -> str:
    return "\n".join(f"{file.name}:\n{file.read_text()}" for file in sorted(folder.glob("output-*")))


def finish(running: Sequence[subprocess.Popen[bytes]], folder: Path, timeout_s: float = 240) -> list[int]:
    end = time.monotonic() + timeout_s
    try:
        return [popen.wait(end - time.monotonic()) for popen in running]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not over after {timeout_s} s\n{output(folder)}") from None


def worlds(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "log").glob("world-*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("backend", ["horovod", "ddp"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_ranks_on_each_host(launcher: str, backend: str, cluster: Cluster, shared: Path) -> None:
    """Ranks know their place, one per host downloads, and the weights equal those of four ranks on one host."""
    argv = [JOB, *OPTIONS, "--backend", backend, "--log-dir", str(shared / "log")]
    pair = cluster.hosts[:2]
    with started(launcher, pair, argv, shared) as running:
        codes = finish(running, shared)
        assert set(codes) == {0}, output(shared)
        # A launcher may be gone a moment before the last of what it has started.
        wait_for(lambda: not any(host.processes() for host in pair), shared)
    ranks = worlds(shared)
    assert [(one["rank"], one["local_rank"], one["node_rank"], one["hostname"]) for one in ranks] == [
        *((0, 0, 0, "hosta"), (1, 1, 0, "hosta")),
        *((2, 0, 1, "hostb"), (3, 1, 1, "hostb")),
    ]
    assert {(one["size"], one["local_size"], one["num_nodes"], one["fetched"]) for one in ranks} == {
        (4, 2, 2, "once\n")
    }
    assert (shared / "log/model.safetensors").read_bytes() == on_one_host("--backend", backend)


@cache
def on_one_host(*options: str) -> bytes:
    """Return the weights of four ranks on one host."""
    with tempfile.TemporaryDirectory() as folder:
        launch(QUICKEST, 4, [JOB, *OPTIONS, *options, "--log-dir", folder])
        return (Path(folder) / "model.safetensors").read_bytes()


LISTENING = """
import psutil
from torch import nn, optim

from hvd_trainer import Callback, Trainer, TrainerOptions, run_job
from hvd_trainer.jobs.images import load_images
from hvd_trainer.jobs.options import ImageOptions


class Listening(Callback):
    def on_epoch_end(self, run, record):
        for socket in psutil.net_connections("tcp"):
            if socket.status == "LISTEN":
                print(f"listens at {socket.laddr.port}", flush=True)


def main(options):
    with Trainer(options) as trainer:
        digits = load_images(ImageOptions(dataset="digits", repeat=1), trainer.backend)
        model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        trainer.fit(model, optimizer, nn.functional.cross_entropy, digits.train, callbacks=[Listening()])


if __name__ == "__main__":
    run_job(TrainerOptions, main)
"""


@pytest.mark.long
@requires("sysctl")
@pytest.mark.parametrize("backend", ["horovod", "ddp"])
@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_ports_are_those_of_the_documented_commands(
    launcher: str, backend: str, cluster: Cluster, shared: Path
) -> None:
    (shared / "job.py").write_text(LISTENING)
    pair = cluster.hosts[:2]
    (pin,) = (command for command in documents.commands() if command.startswith("sysctl"))
    for host in pair:
        host.run(shlex.split(pin))
    argv = [str(shared / "job.py"), "--epochs", "1", "--backend", backend]
    started_by = commands(launcher, pair, argv, 1)
    if launcher == "mpirun":
        (options,) = (code for code in documents.inline_code("docs/cluster.md") if "btl_tcp_port_min_v4" in code)
        started_by = [(host, ["mpirun", *shlex.split(options), *words[1:]]) for host, words in started_by]
    with typed(started_by, pair, shared) as running:
        assert set(finish(running, shared)) == {0}, output(shared)
    ports = {int(port) for port in re.findall(r"listens at (\d+)", output(shared))}
    expected = {22, *range(50_000, 51_000), *(range(51_000, 51_200) if launcher == "mpirun" else ())}
    (given,) = {int(port) for _, words in started_by for port in re.findall(r"\b296\d\d\b", " ".join(words))}
    # Once all ranks are connected, Horovod and the monitor no longer listen: the store is left.
    assert ports & set(range(50_000, 51_000))
    assert not ports - expected - {given}


SCRIPT = """
import os
import socket

import horovod.torch as hvd
import psutil
import torch

os.environ["HOROVOD_GLOO_IFACE"] = "eth1"
hvd.init()
small = hvd.allreduce(torch.ones(2) * hvd.rank(), op=hvd.Sum)
large = hvd.allreduce(torch.ones(100_000) * hvd.rank(), op=hvd.Sum)
assert small.sum() == 12 and large.mean() == 6
names = hvd.allgather_object(socket.gethostname())
if hvd.rank() == 0:
    peers = {its.raddr.ip for its in psutil.Process().net_connections("tcp") if its.raddr}
    print(*names, hvd.local_size(), hvd.cross_size(), "10.78.0.2" in peers, flush=True)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS[1:])
def test_horovods_script_needs_no_horovodrun(launcher: str, cluster: Cluster, shared: Path) -> None:
    """Four ranks of a script for Horovod, unchanged, on torch.distributed; they exchange over the second card."""
    (shared / "script.py").write_text(SCRIPT)
    argv = ["-m", "hvd_trainer", "run", "--backend", "ddp", "--", str(shared / "script.py")]
    with started(launcher, cluster.hosts[:2], argv, shared) as running:
        assert set(finish(running, shared)) == {0}, output(shared)
    assert "hosta hosta hostb hostb 2 2 True" in output(shared)


@pytest.mark.long
@requires("mpirun", "mpi4py")
@pytest.mark.parametrize("backend", ["horovod", "ddp"])
def test_mpirun_without_address(backend: str, cluster: Cluster, shared: Path) -> None:
    """The endpoint is broadcast by MPI."""
    words = ["mpirun", "--allow-run-as-root", "-np", "2", "-H", "hosta:1,hostb:1", "-x", "HOME", sys.executable]
    argv = [JOB, *OPTIONS, "--backend", backend, "--log-dir", str(shared / "log")]
    done = cluster.hosts[0].run([*words, *argv], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    places = [(one["rank"], one["hostname"], one["node_rank"], one["launcher"]) for one in worlds(shared)]
    assert places == [(0, "hosta", 0, "mpirun"), (1, "hostb", 1, "mpirun")]


@requires("horovodrun")
def test_horovodrun_refuses_changed_host_key(cluster: Cluster, shared: Path) -> None:
    """Horovod's own horovodrun would send the job and the environment to any host that answers."""
    first = cluster.hosts[0]
    known = cluster.folder / "known_hosts"
    before = known.read_text()
    other = f"{(cluster.folder / 'user_key.pub').read_text()}\n"
    try:
        known.write_text("".join(f"{host.name} {other}" for host in cluster))
        run = [str(HOROVODRUN), "--disable-cache", "-np", "2", "-H", "hosta:1,hostb:1"]
        words = [*run, "touch", f"{shared}/came"]
        refused = first.run(words, check=False)
        assert refused.returncode != 0
        assert "Host key verification failed" in refused.stdout + refused.stderr
        assert not (shared / "came").exists()
        # An unknown host is still accepted.
        known.write_text("")
        first.run(words)
        assert (shared / "came").exists()
    finally:
        known.write_text(before)


@pytest.mark.long
@pytest.mark.parametrize("backend", [case("horovod", when="long"), case("ddp")])
def test_four_stages_over_two_hosts(backend: str, cluster: Cluster, shared: Path) -> None:
    """Hosts exchange activations and gradients; the weights equal those of one host."""
    stages = ["--stages", "4", "--chunks", "4", "--balance", "1,1,1,1", "--backend", backend]
    argv = [JOB, *OPTIONS, *stages, "--log-dir", str(shared / "log")]
    with started("torchrun", cluster.hosts[:2], argv, shared) as running:
        assert finish(running, shared) == [0, 0], output(shared)
    assert (shared / "log/model.safetensors").read_bytes() == on_one_host(*stages)


def by_hand(
    pair: Sequence[Host], argv: Sequence[str], folder: Path, secrets: Sequence[str]
) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """Start a rank on each host by hand, with one address and port, and a secret for each."""
    where = {"MASTER_ADDR": pair[0].name, "MASTER_PORT": str(next(PORTS))}
    environs = []
    for rank, (host, secret) in enumerate(zip(pair, secrets, strict=True)):
        file = folder / f"secret-{host.name}"
        file.write_text(secret)
        file.chmod(0o600)
        own = digits_job.by_hand(rank, len(pair), HVD_TRAINER_SECRET_FILE=str(file))
        environs.append({**where, **own})
    return typed([(host, [sys.executable, *argv]) for host in pair], pair, folder, environs)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["horovod", "ddp"])
def test_ranks_by_hand_with_secret_and_second_interface(backend: str, cluster: Cluster, shared: Path) -> None:
    """The ranks meet at the interface of the name, and exchange over the other one."""
    log = ["--log-dir", str(shared / "log"), "--network-interface", "eth1"]
    pair = cluster.hosts[:2]
    with by_hand(pair, [JOB, *ENDLESS, "--backend", backend, *log], shared, ["ours" * 8] * 2):
        wait_for(lambda: steps(shared) > 3, shared)
        pids = {str(one["pid"]) for one in worlds(shared)}
        assert "10.78.0.1" in {line[0] for line in sockets(pair[0], "", pids)}
        assert "ours" not in output(shared)


def test_ranks_by_hand_find_their_places(cluster: Cluster, shared: Path) -> None:
    """LOCAL_RANK and LOCAL_WORLD_SIZE were asked for."""
    argv = [JOB, *OPTIONS, "--backend", "ddp", "--log-dir", str(shared / "log")]
    pair = cluster.hosts[:2]
    where = {"MASTER_ADDR": pair[0].name, "MASTER_PORT": str(next(PORTS))}
    environs = [digits_job.by_hand(rank, 3, **where) for rank in range(3)]
    ranks = [(host, [sys.executable, *argv]) for host in (*pair, pair[0])]
    with typed(ranks, pair, shared, environs) as running:
        assert finish(running, shared) == [0] * 3, output(shared)
    places = [(one["hostname"], one["local_rank"], one["local_size"], one["node_rank"]) for one in worlds(shared)]
    assert places == [("hosta", 0, 2, 0), ("hostb", 0, 1, 1), ("hosta", 1, 2, 0)]


def test_ranks_with_different_secrets_do_not_join(cluster: Cluster, shared: Path) -> None:
    argv = [JOB, *OPTIONS, "--log-dir", str(shared / "log"), "--backend", "ddp", "--startup-timeout-s", "5"]
    with by_hand(cluster.hosts[:2], argv, shared, ["ours" * 8, "theirs" * 8]) as running:
        assert finish(running, shared) == [2, 2], output(shared)
    # The first rank that times out ends the other one.
    assert re.search(r"or another HVD_TRAINER_SECRET_FILE|lost the others while they were meeting", output(shared))
    assert not (shared / "log/model.safetensors").exists()


@pytest.mark.long
def test_horovodrun_trains_on_three_hosts(cluster: Cluster, shared: Path) -> None:
    argv = [JOB, *OPTIONS, "--backend", "horovod", "--log-dir", str(shared / "log")]
    with started("horovodrun", cluster.hosts, argv, shared, each=1) as running:
        assert finish(running, shared) == [0], output(shared)
    places = [(one["hostname"], one["node_rank"], one["local_rank"], one["num_nodes"]) for one in worlds(shared)]
    assert places == [("hosta", 0, 0, 3), ("hostb", 1, 0, 3), ("hostc", 2, 0, 3)]


@pytest.mark.long
def test_checkpoints_without_shared_folder(cluster: Cluster, shared: Path) -> None:
    """If rank 0 is on another host than the checkpoints, the job stops with an error, and does not start anew."""
    first, second, _ = cluster
    argv = [JOB, *OPTIONS, "--no-quiet", "--log-dir", "/tmp/log", "--resume", "auto"]
    (shared / "log").mkdir()  # for what the job says of its ranks
    for pair, epochs, code in (((first, second), 1, 0), ((second, first), 2, 2), ((first, second), 2, 0)):
        more = ["--epochs", str(epochs), "--save-every-epochs", "1"]
        with started("horovodrun", pair, [*argv, *more], shared, each=1) as run:
            assert (finish(run, shared) == [0]) == (code == 0), output(shared)
        if code:
            newest = "on hosta has a checkpoint after 8 steps, and on hostb, where rank 0 is, the newest is none"
            assert f"/tmp/log {newest}" in output(shared)
    assert "at epoch 2, after 8 steps" in output(shared)


def wait_for(happened: Callable[[], bool], folder: Path) -> None:
    waiting.wait_for(happened, lambda: output(folder))


def steps(folder: Path) -> int:
    """Return how many steps have been logged."""
    return len(lines(folder / "log", "step"))


ENDLESS = ("--epochs", "1000", "--batch-size", "32", "--log-every", "1", "--seconds-per-step", "0.05")


@pytest.mark.long
@pytest.mark.parametrize("backend", ["horovod", "ddp"])
def test_network_interface_is_used_exclusively(backend: str, cluster: Cluster, shared: Path) -> None:
    """Rank 0 listens at the named interface only, and the ranks exchange over it."""
    pair = cluster.hosts[:2]
    argv = [JOB, *ENDLESS, "--backend", backend, "--log-dir", str(shared / "log"), "--network-interface", "eth1"]
    with started("torchrun", pair, argv, shared, each=1):
        wait_for(lambda: steps(shared) > 3, shared)
        for host, own in zip(pair, ("10.78.0.1", "10.78.0.2"), strict=True):
            pids = {str(one["pid"]) for one in worlds(shared) if one["hostname"] == host.name}
            open_at = {line[0] for line in sockets(host, "-l", pids)}
            assert open_at <= {own, "127.0.0.1"}, open_at
            assert {line[0] for line in sockets(host, "", pids)} >= {own}


def sockets(host: Host, option: str, pids: set[str]) -> list[tuple[str, str]]:
    """Return local and remote address of these processes' TCP sockets: connected ones, or (-l) listening ones."""
    lines = host.run(["ss", "-tnpH", *([option] if option else [])]).stdout.splitlines()
    ours = [line.split() for line in lines if pids & set(re.findall(r"pid=(\d+)", line))]
    return [(here.rpartition(":")[0], there.rpartition(":")[0]) for _, _, _, here, there, *_ in ours]


def test_network_interface_missing(cluster: Cluster, shared: Path) -> None:
    argv = [JOB, *OPTIONS, "--log-dir", str(shared / "log"), "--network-interface", "ib0"]
    with started("torchrun", cluster.hosts[:1], argv, shared) as running:
        assert finish(running, shared) != [0]
    text = (
        "Network interface ib0 (--network-interface, HOROVOD_GLOO_IFACE): hosta has none of that name with an "
        "IPv4 address. It has eth0 (10.77.0.1), eth1"
    )
    assert text in output(shared)


@pytest.mark.warm(False)
@pytest.mark.long
@pytest.mark.parametrize(("fate", "backend"), [case("cut", "horovod"), case("dead", "ddp", when="long")])
def test_lost_host_ends_job(fate: str, backend: str, shared: Path) -> None:
    """A pulled cable or a host without power closes no connection; the job ends after --timeout-s."""
    with hosts("hosta", "hostb") as cluster:
        first, second = cluster
        log = ["--log-dir", str(shared / "log"), "--timeout-s", "8"]
        argv = [JOB, *ENDLESS, "--backend", backend, *log]
        with started("horovodrun", cluster.hosts, argv, shared) as running:
            wait_for(lambda: steps(shared) > 3, shared)
            began = time.monotonic()
            if fate == "cut":
                cluster.cut(second)
            else:
                second.die()
            assert finish(running, shared) != [0]
            print(f"{fate}, {backend}: over after {time.monotonic() - began:.1f} s")
            wait_for(lambda: first.processes() == [], shared)
            if fate == "cut":
                wait_for(lambda: second.processes() == [], shared)
        assert "hostb" in output(shared)


@pytest.mark.warm(False)
@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "backend"),
    [case("horovodrun", "horovod"), case("horovodrun", "ddp", when="long"), case("torchrun", "ddp", when="long")],
)
def test_survivors_continue_without_lost_host(launcher: str, backend: str, shared: Path) -> None:
    """No connection is closed. In elastic mode the others once waited for --startup-timeout-s, and horovodrun for
    --elastic-timeout."""
    with hosts("hosta", "hostb", "hostc") as cluster:
        first, _, third = cluster.hosts
        argv = [JOB, *ENDLESS, "--backend", backend, "--log-dir", str(shared / "log"), "--timeout-s", "8"]
        if launcher == "horovodrun":
            script = shared / "hosts.sh"
            script.write_text("printf 'hosta:1\\nhostb:1\\nhostc:1\\n'\n")
            options = ["-np", "3", "--min-np", "2", "--network-interfaces", "eth0", "--elastic-timeout", "20"]
            words = [str(HOROVODRUN), *options, "--host-discovery-script", f"sh {script}", sys.executable]
            commands = [(first, [*words, *argv, "--commit-every-steps", "5"])]
        else:
            words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:3", "--nproc-per-node", "1"]
            where = ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", f"hosta:{next(PORTS)}"]
            run = [*words, "--max-restarts", "3", *where, *argv, "--save-every-steps", "5"]
            commands = [(host, run) for host in cluster]
        with typed(commands, [host for host in cluster if host is not third], shared):
            wait_for(lambda: steps(shared) > 20, shared)
            began = time.monotonic()
            third.die()
            wait_for(lambda: "resume   restored" in output(shared).partition("2 ranks on 2 nodes")[2], shared)
            print(f"{launcher}, {backend}: goes on after {time.monotonic() - began:.1f} s")
            before = steps(shared)
            wait_for(lambda: steps(shared) > before + 5, shared)
        assert re.search(r"failure: rank \d of 3 on hostc .*: has not answered for \d+ s", output(shared))


@pytest.mark.warm(False)
@pytest.mark.long
@pytest.mark.parametrize("backend", [case("horovod"), case("ddp")])
def test_short_network_outage_changes_nothing(backend: str, shared: Path) -> None:
    argv = [JOB, *OPTIONS, "--backend", backend, "--log-every", "1", "--timeout-s", "30"]
    with hosts("hosta", "hostb") as cluster:
        slow = [*argv, "--seconds-per-step", "0.3", "--log-dir", str(shared / "log")]
        with started("torchrun", cluster.hosts, slow, shared, each=1) as running:
            wait_for(lambda: steps(shared) > 3, shared)
            cluster.cut(cluster.hosts[1])
            time.sleep(5)
            before = steps(shared)
            cluster.mend(cluster.hosts[1])
            assert finish(running, shared) == [0, 0], output(shared)
    assert before < 16
    launch(QUICKEST, 2, [*argv, "--log-dir", str(shared / "alone")])
    weights = [(shared / name / "model.safetensors").read_bytes() for name in ("log", "alone")]
    assert weights[0] == weights[1]


@pytest.mark.warm(False)
@pytest.mark.long
@requires("horovodrun")
@pytest.mark.parametrize("where", ["elsewhere", case("here, and bash is sh", when="long")])
def test_sigterm_to_launcher_lets_all_ranks_save(where: str, shared: Path) -> None:
    """Ranks on other hosts got no signal, those under bash were frozen, and all had 5 s, less than a step."""
    with hosts("hosta", "hostb", "hostc") as cluster:
        first, *others = cluster.hosts
        slots = "hostb:1,hostc:1" if where == "elsewhere" else "hosta:2"
        if where != "elsewhere":
            first.run(["mount", "--bind", "/bin/bash", "/bin/sh"])
        options = ["--epochs", "9", "--log-every", "1", "--seconds-per-step", "8", "--no-quiet"]
        words = [str(HOROVODRUN), "-np", "2", "-H", slots, sys.executable, JOB, *options, "--batch-size", "32"]
        with (shared / "output-hosta").open("wb") as file:
            command = first.command([*words, "--log-dir", str(shared / "log")])
            with subprocess.Popen(command, stdout=file, stderr=file, env=first.environ) as running:
                wait_for(lambda: steps(shared) > 0, shared)
                first.run(["pkill", "-TERM", "-f", "horovodrun -np"])
                assert finish([running], shared) != [0]
        for host in (first, *others):
            wait_for(lambda host=host: host.processes() == [], shared)  # type: ignore[misc]
        stopped = re.search(r"stopped by a signal after step (\d+), and saved", output(shared))
        assert stopped is not None, output(shared)
        assert (shared / f"log/checkpoints/step-{int(stopped[1]):09}/manifest.json").exists()


SERVE = """
import socket
with socket.create_server(("0.0.0.0", 5000)) as server:
    print("ready", flush=True)
    with server.accept()[0] as line:
        while line.recv(1 << 20):
            pass
        line.sendall(b"x")
"""
SEND = """
import socket, sys, time
with socket.create_connection(("hostb", 5000)) as line:
    began = time.monotonic()
    line.sendall(bytes(int(sys.argv[1])))
    line.shutdown(socket.SHUT_WR)
    line.recv(1)
    print(time.monotonic() - began)
"""


def there_and_back_s(cluster: Cluster, size: int) -> float:
    """Return how long it takes to send so many bytes to the second host, and one byte back."""
    first, second, _ = cluster
    words = second.command([sys.executable, "-c", SERVE])
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=second.environ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        return float(first.run([sys.executable, "-c", SEND, str(size)]).stdout)


@pytest.mark.parametrize(("size", "least_s"), [(1, 0.020), (2_500_000, 0.220)])
def test_slow_link_latency_and_bandwidth(size: int, least_s: float, cluster: Cluster) -> None:
    """A round trip takes twice 10 ms, and 2.5 MB take 200 ms at 100 Mbit/s."""
    with cluster.slow(cluster.hosts[1], mbit=100, delay_ms=10):
        assert there_and_back_s(cluster, size) >= least_s


@pytest.mark.parametrize("number", [2, 3])
def test_slow_link_delay_for_any_number_of_hosts(number: int, cluster: Cluster) -> None:
    with cluster.slow_between(cluster.hosts[:number], mbit=100, delay_ms=50):
        assert there_and_back_s(cluster, 1) >= 0.1
