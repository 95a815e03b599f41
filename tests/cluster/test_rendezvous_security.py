"""What other users of a machine can do to a job by its sockets and files: units, and attacks on real jobs."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import attacks
import digits_job
import psutil
import pytest
import torch.distributed as dist
from combinations import each_pair
from launchers import SUPPORT, Job, launch, start
from records import lines
from waiting import wait_for

from hvd_trainer.errors import LaunchError, first_line
from hvd_trainer.launch.world import World
from hvd_trainer.rendezvous import store_client, store_protocol, store_server
from hvd_trainer.rendezvous.endpoint import (
    SECRET_FILE,
    Endpoint,
    create_token,
    parse_endpoint,
    read_secret,
    sign_endpoint,
    verify_endpoint,
)
from hvd_trainer.rendezvous.join import RendezvousSettings, join_by_registry
from hvd_trainer.rendezvous.registry import FileRegistry, private_file
from hvd_trainer.utils.members import HELLO, MAX_UNAUTHENTICATED, accept_members, send_hello
from hvd_trainer.utils.network import LOOPBACK

pytestmark = pytest.mark.warm

JOB = str(SUPPORT / "hosts_job.py")
REQUESTS = 10_000
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    served = store_client.serve(LOOPBACK)
    yield served
    store_client.release(served)


def join(endpoint: Endpoint, timeout_s: float = 10) -> dist.Store:
    return store_client.connect(endpoint, timedelta(seconds=timeout_s))


def test_store_supports_operations_of_tcp_store(endpoint: Endpoint) -> None:
    store, other = join(endpoint), join(endpoint)
    store.set("a", "1")
    assert other.get("a") == b"1"
    assert [store.add("n", 3), other.add("n", -5), store.get("n")] == [3, -2, b"-2"]
    assert [store.check(["a", "n"]), store.check(["a", "b"])] == [True, False]
    assert [
        store.compare_set("c", "", "x"),
        store.compare_set("c", "x", "y"),
        store.compare_set("c", "q", "z"),
    ] == [b"x", b"y", b"y"]
    store.append("a", "2")
    store.multi_set(["k", "l"], [b"3", b""])
    assert other.multi_get(["a", "k", "l"]) == [b"12", b"3", b""]
    assert [store.delete_key("k"), store.delete_key("k"), other.check(["k"])] == [True, False, False]
    large = os.urandom(20 << 20)
    store.set("large", large)
    assert other.get("large") == large
    # A wait that times out is cancelled, and the connection stays usable.
    with pytest.raises(dist.DistStoreError, match="timeout after 100ms"):
        store.wait(["never"], timedelta(seconds=0.1))
    other.set("never", "late")
    store.wait(["never"])
    assert store.clone().get("never") == b"late"


@pytest.mark.parametrize("operation", ["add", "append"])
def test_store_changes_a_value_once_the_query_is_complete(operation: str) -> None:
    """It took the value when the key had arrived: what another rank added until the rest came was lost."""
    key, number = f"/{TOKEN}/n".encode(), b"7"
    query = struct.pack("=BQ", {"add": 4, "append": 9}[operation], len(key)) + key
    rest = struct.pack("=q", 7) if operation == "add" else struct.pack("=Q", len(number)) + number
    with server_here() as port, socket.create_connection((LOOPBACK, port), timeout=5) as slow:
        store = join(Endpoint(LOOPBACK, port, TOKEN))
        slow.sendall(attacks.MAGIC + query)
        time.sleep(0.1)
        store.set("n", "1")
        slow.sendall(rest + struct.pack("=BI", 13, 5))
        answered = b""
        while not answered.endswith(struct.pack("=I", 5)):
            answered += slow.recv(100)
        assert store.get("n") == (b"8" if operation == "add" else b"17")


def test_store_answers_a_wait_for_keys_that_are_set_in_order() -> None:
    key = f"/{TOKEN}/n".encode()
    sized = struct.pack("=Q", len(key)) + key
    with server_here() as port, socket.create_connection((LOOPBACK, port), timeout=5) as line:
        wait_, ping = struct.pack("=BQ", 6, 1) + sized, struct.pack("=BI", 13, 5)
        line.sendall(attacks.MAGIC + b"\1" + sized + struct.pack("=Q", 0) + wait_ + ping)
        answered = b""
        while len(answered) < 5:
            answered += line.recv(100)
        assert answered == b"\0" + struct.pack("=I", 5)


def store_here() -> store_protocol.Store:
    reading, writing = os.pipe()
    os.write(writing, f"{TOKEN}\n".encode())
    os.close(writing)
    return store_protocol.Store(reading)


def test_store_serves_others_while_a_large_value_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_protocol, "READ_BYTES", 1000)
    key, value = f"/{TOKEN}/n".encode(), bytes(50_000)

    async def turns_of_others() -> int:
        store, (ours, theirs) = store_here(), socket.socketpair()
        theirs.setblocking(False)
        ours.sendall(
            attacks.MAGIC + b"\1" + struct.pack("=Q", len(key)) + key + struct.pack("=Q", len(value)) + value
        )
        client, turns = store_protocol.Client(theirs, store), 0
        while key not in store.values:
            turns += 1
            await asyncio.sleep(0)
        client.close()
        ours.close()
        return turns

    assert asyncio.run(turns_of_others()) > 30


def test_store_forgets_keys_that_nobody_waits_for_any_more() -> None:
    async def awaited(store: store_protocol.Store) -> list[int]:
        waits = [asyncio.create_task(store.wait([b"never"])) for _ in range(2)]
        sizes = []
        while waits:
            await asyncio.sleep(0.01)
            sizes.append(len(store._awaited))
            waits.pop().cancel()
        await asyncio.sleep(0.01)
        return [*sizes, len(store._awaited)]

    assert asyncio.run(awaited(store_here())) == [1, 1, 0]


def test_store_wait_returns_when_another_client_sets(endpoint: Endpoint) -> None:
    waiting, setting = join(endpoint), join(endpoint)
    thread = threading.Timer(0.2, lambda: (setting.set("x", "1"), setting.set("y", "2")))
    thread.start()
    waiting.wait(["x", "y"])
    thread.join()


def test_store_refuses_wrong_token(endpoint: Endpoint) -> None:
    join(endpoint).set("a", "mine")
    with pytest.raises(dist.DistNetworkError):
        join(Endpoint(LOOPBACK, endpoint.port, "0" * 32))
    attempts: list[Callable[[dist.Store], object]] = [
        lambda store: store.set(f"{'0' * 32}/a", "evil") or store.num_keys(),
        lambda store: store.get("a"),
        lambda store: store.add("a", 1),
        lambda store: store.num_keys(),
        lambda store: store.delete_key("a"),
    ]
    for attempt in attempts:
        attacker = dist.TCPStore(LOOPBACK, endpoint.port, is_master=False, timeout=timedelta(seconds=2))
        with pytest.raises(dist.DistNetworkError):
            attempt(attacker)
    assert join(endpoint).get("a") == b"mine"


def test_store_server_survives_invalid_value(endpoint: Endpoint) -> None:
    store = join(endpoint)
    store.add("n", 2**62)
    with pytest.raises(dist.DistNetworkError):
        store.add("n", 2**62)
    assert join(endpoint).check(["n"])


def test_serve_replaces_killed_server(endpoint: Endpoint) -> None:
    (server,) = [child for child in psutil.Process().children() if "store_server" in " ".join(child.cmdline())]
    server.kill()
    psutil.wait_procs([server], timeout=5)
    second = store_client.serve(LOOPBACK)
    join(second).set("a", "1")
    store_client.release(second)


def test_verify_endpoint_needs_the_secret() -> None:
    token, nonce = create_token("our secret")
    endpoint = Endpoint("10.0.0.1", 4000, token)
    text = sign_endpoint(endpoint, nonce, "our secret")
    assert token not in text
    assert verify_endpoint(text, "our secret") == endpoint
    assert verify_endpoint(text, "another secret") is None
    for changed in (text.replace("4000", "4001"), text.replace("10.0", "10.1"), text[:-1], "evil", ""):
        assert verify_endpoint(changed, "our secret") is None
    with pytest.raises(LaunchError, match="rank 0 has HVD_TRAINER_SECRET_FILE, and this rank has not"):
        verify_endpoint(text, None)
    with pytest.raises(LaunchError, match="this rank has HVD_TRAINER_SECRET_FILE, and rank 0 has not"):
        verify_endpoint(str(endpoint), "our secret")
    assert verify_endpoint(str(endpoint), None) == endpoint
    with pytest.raises(LaunchError, match="should be the endpoint of a job's store"):
        parse_endpoint("127.0.0.1:29500")


def test_store_server_ends_when_all_endpoints_are_released(endpoint: Endpoint) -> None:
    second = store_client.serve(LOOPBACK)
    assert second.port == endpoint.port
    assert second.token != endpoint.token
    store_client.release(second)
    join(endpoint).set("a", "1")
    third = store_client.serve("127.0.0.2")
    store_client.release(third)
    with pytest.raises(dist.DistNetworkError):
        join(third, 1)


@as_root
def test_store_survives_garbage(endpoint: Endpoint) -> None:
    store = join(endpoint)
    store.set("a", "1")
    assert attacks.by_another_user(attacks.flood, [endpoint.port], REQUESTS) > 0.9 * REQUESTS
    assert store.get("a") == b"1"
    assert join(endpoint).get("a") == b"1"


def test_store_server_closes_oldest_unauthenticated_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that have sent a key with a token stay."""
    monkeypatch.setattr(store_server, "MAX_UNAUTHENTICATED", 3)
    with server_here() as port, ExitStack() as stack:
        known = join(Endpoint(LOOPBACK, port, TOKEN))
        first, *others = [
            stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=5)) for _ in range(4)
        ]
        assert first.recv(1) == b""
        assert known.check(["joined"]) is False
        for line in others:
            line.settimeout(0.1)
            with pytest.raises(TimeoutError):
                line.recv(1)


def test_store_reads_limited_bytes_before_authentication() -> None:
    with server_here() as port, socket.create_connection((LOOPBACK, port), timeout=5) as line:
        pings = attacks.MAGIC + struct.pack("=BI", 13, 7) * 40_000
        answered = 0
        with suppress(OSError):
            line.sendall(pings)
            while data := line.recv(1 << 16):
                answered += len(data) // 4
        assert answered <= store_protocol.MAX_UNAUTHENTICATED_BYTES // 5


TOKEN = "a" * 32


@contextmanager
def server_here() -> Iterator[int]:
    """Run a server with one token in a thread of this process; yield its port."""
    reading, writing = os.pipe()
    with socket.create_server((LOOPBACK, 0)) as listener:
        server = store_server.StoreServer(listener, reading)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
        os.write(writing, f"{TOKEN}\n".encode())
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            os.close(writing)
            thread.join()
            os.close(reading)


@contextmanager
def accepting(*members: int) -> Iterator[tuple[int, Future[dict[int, socket.socket]]]]:
    """Accept members in another thread; yield the port, and what is accepted."""
    waits_until = time.monotonic() + 60

    def on_wait() -> None:
        assert time.monotonic() < waits_until, "not all have come"

    with socket.create_server((LOOPBACK, 0), backlog=200) as listener, ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept_members, listener, TOKEN, members, on_wait)
        yield listener.getsockname()[1], accepted
        for connection in accepted.result().values():
            connection.close()


def connected(port: int, stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection((LOOPBACK, port), timeout=10))


def test_accept_members_closes_connections_whose_first_message_is_invalid() -> None:
    """Text that cannot be encoded once ended the monitor: any user could connect before the ranks had."""
    with ExitStack() as stack, accepting(1, 2) as (port, accepted):
        send_hello(connected(port, stack), TOKEN, 1)
        for message in (
            b"\xff",
            b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n",
            bytes.fromhex(TOKEN),
            HELLO.pack(bytes(16), 2),
            HELLO.pack(bytes.fromhex(TOKEN), 0),
            HELLO.pack(bytes.fromhex(TOKEN), 1),
            HELLO.pack(bytes.fromhex(TOKEN), 3),
        ):
            stranger = connected(port, stack)
            stranger.sendall(message)
            with suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", message
        assert not accepted.done()
        send_hello(connected(port, stack), TOKEN, 2)
        assert accepted.result(10).keys() == {1, 2}


def test_accept_members_hears_them_beside_silent_clients() -> None:
    """Each stranger was waited for, one after the other."""
    with ExitStack() as stack, accepting(1) as (port, accepted):
        first, *others = [connected(port, stack) for _ in range(MAX_UNAUTHENTICATED + 5)]
        assert first.recv(1) == b"", "the oldest is closed"
        send_hello(member := connected(port, stack), TOKEN, 1)
        member.sendall(b"more")
        assert accepted.result(10)[1].recv(10) == b"more"
        assert [stranger.recv(1) for stranger in others[-2:]] == [b"", b""]


def test_accept_members_gives_up() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener, pytest.raises(ZeroDivisionError):
        accept_members(listener, TOKEN, [1], lambda: 1 / 0)


def test_accept_members_waits_while_no_descriptor_is_left() -> None:
    """It asked again at once, and so used a core until some file was closed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    turns: list[float] = []
    filling: list[int] = []

    def refill() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        while filling:
            os.close(filling.pop())

    def on_wait() -> None:
        turns.append(time.monotonic())
        if len(turns) == 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), before[1]))
            with suppress(OSError):
                while True:
                    filling.append(os.dup(0))
            member.connect(listener.getsockname())
            send_hello(member, TOKEN, 1)
        elif turns[-1] - turns[0] > 1:
            refill()

    with socket.create_server((LOOPBACK, 0)) as listener, socket.socket() as member:
        try:
            (accepted,) = accept_members(listener, TOKEN, [1], on_wait).values()
        finally:
            refill()
        accepted.close()
    assert turns[-1] - turns[0] > 1, "it was accepted while there was none"
    assert len(turns) < 50


def test_first_line_hides_token(endpoint: Endpoint) -> None:
    store = join(endpoint)
    with pytest.raises(dist.DistStoreError) as caught:
        store.wait(["peer/1"], timedelta(seconds=0.1))
    assert endpoint.token in str(caught.value)
    assert first_line(caught.value) == "wait timeout after 100ms, keys: /peer/1"


def test_traceback_hides_token(tmp_path: Path) -> None:
    """A script that starts an engine by itself prints the whole chain of exceptions."""
    script = tmp_path / "own.py"
    script.write_text(
        "from hvd_trainer import EngineOptions, backends\n"
        "with backends.create(EngineOptions(backend='ddp', startup_timeout_s=2)):\n    pass\n"
    )
    env = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": digits_job.free_port(), "TMPDIR": tmp_path}
    with start("python", 1, [script], env={**digits_job.by_hand(0, 2), **env}) as alone:
        ended = alone.wait()
    assert "waited for all 2 ranks, and rank 1 did not come" in ended.stderr
    assert "keys: /hvd_trainer.0/peer/1" in ended.stderr
    assert re.search(r"[0-9a-f]{32}", ended.stderr) is None


def test_read_secret(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(LaunchError, match="cannot be read"):
        read_secret({SECRET_FILE: str(file)})
    file.write_text("a" * 32)
    file.chmod(0o644)
    with pytest.raises(LaunchError, match="may be read by others. Type: chmod 600"):
        read_secret({SECRET_FILE: str(file)})
    file.chmod(0o600)
    assert read_secret({SECRET_FILE: str(file)}) == "a" * 32
    if os.geteuid() == 0:
        # Of root, and readable by a group, as Kubernetes mounts secrets for a pod's user.
        file.chmod(0o440)
        assert read_secret({SECRET_FILE: str(file)}) == "a" * 32
        os.chown(file, attacks.NOBODY, -1)
        with pytest.raises(LaunchError, match="may be read by others"):
            read_secret({SECRET_FILE: str(file)})
        os.chown(file, 0, -1)
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(LaunchError, match="should hold 16 characters or more, and holds 5"):
        read_secret({SECRET_FILE: str(file)})
    assert read_secret({}) is None


@as_root
@pytest.mark.parametrize("kind", ["theirs", "writable", "link"])
def test_private_file_refuses_folder_of_another_user(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "hvd_trainer-0"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777 if kind == "writable" else 0o700)
        os.chown(folder, attacks.NOBODY if kind == "theirs" else 0, -1)
    with pytest.raises(LaunchError, match="is not a folder for you alone"):
        private_file("job")


def test_file_registry_does_not_wait_for_a_planted_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job")
    with pytest.raises(OSError, match="it is a pipe or a device"):
        FileRegistry(tmp_path / "job").lookup()


def test_endpoint_counts_once_its_server_has_proved_its_token(endpoint: Endpoint) -> None:
    """A killed job leaves its endpoint behind; who listens at that port since must get neither ranks nor token."""
    second = store_client.serve(LOOPBACK)
    assert [store_client.is_served(one) for one in (endpoint, second)] == [True, True]
    store_client.release(second)
    assert not store_client.is_served(Endpoint(LOOPBACK, endpoint.port, TOKEN))
    heard = []

    def answer(listener: socket.socket) -> None:
        with listener.accept()[0] as connection:
            heard.append(connection.recv(1000))
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + bytes(32))

    with socket.create_server((LOOPBACK, 0)) as listener:
        stranger = threading.Thread(target=answer, args=(listener,))
        stranger.start()
        assert not store_client.is_served(Endpoint(LOOPBACK, listener.getsockname()[1], TOKEN))
        stranger.join()
    assert TOKEN.encode() not in heard[0]
    assert not store_client.is_served(Endpoint(LOOPBACK, int(digits_job.free_port()), TOKEN))


def test_rank_does_not_join_a_killed_job(tmp_path: Path) -> None:
    port = digits_job.free_port()
    (tmp_path / "job").write_text(f"{LOOPBACK}:{port}/{TOKEN}")
    settings = RendezvousSettings(
        world=World(1, 2, 1, 2), environ={}, session="", secret=None, address=None, timeout=timedelta(seconds=0.1)
    )
    with pytest.raises(LaunchError, match=rf"waited 0 s for rank 0, which does not answer at {LOOPBACK}:{port}\."):
        join_by_registry(FileRegistry(tmp_path / "job"), settings, LOOPBACK)


# Real jobs.


def listening(job: Job) -> dict[int, tuple[str, psutil.Process]]:
    """Return address and process by port, of a job's ranks and their children, without its launcher."""
    found = {}
    for process in job.processes():
        words = process.cmdline()
        if JOB in words[1:3] or "store_server" in " ".join(words):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found[one.laddr.port] = (one.laddr.ip, process)
    return found


def files_under(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.long
@as_root
@each_pair(push=2)
def test_job_withstands_another_user(launcher: str, backend: str, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def options(folder: Path) -> list[Any]:
        job = ["--batch-size", "5", "--epochs", "12", "--log-every", "1", "--seconds-per-step", "0.02", "--wait"]
        return [JOB, *job, "--backend", backend, "--log-dir", folder]

    log = tmp_path / "log"
    with start(launcher, 2, options(log), env={"TMPDIR": str(temporary)}) as job:
        wait_for(lambda: len(lines(log, "step")) > 2, lambda: job.report("no steps"))
        [entry] = temporary.glob("hvd_trainer-0/*")
        token = parse_endpoint(entry.read_text()).token
        ports = listening(job)
        assert {address for address, _ in ports.values()} <= {LOOPBACK, "::ffff:127.0.0.1"}, ports
        assert any("store_server" in " ".join(process.cmdline()) for _, process in ports.values()), ports
        # The token is in no command line, and in no file that another user can read.
        typed = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        assert not [words for words in typed if token in " ".join(words)]
        secret = [entry, *(f"/proc/{process.pid}/environ" for process in job.processes())]
        assert attacks.by_another_user(attacks.readable, [str(path) for path in secret]) == []
        assert attacks.by_another_user(attacks.answers, list(ports), f"/{'0' * 32}/peers") == {}
        before = len(lines(log, "step"))
        assert attacks.by_another_user(attacks.flood, list(ports), REQUESTS) > 0.9 * REQUESTS
        assert len(lines(log, "step")) > before
        (log / "over").touch()
        ended = job.wait()
        assert ended.returncode == 0, job.report("failed")
    assert token not in ended.stdout + ended.stderr
    assert not [file for file in files_under(log) if token.encode() in file.read_bytes()]
    calm = tmp_path / "calm"
    calm.mkdir()
    (calm / "over").touch()
    launch(launcher, 2, options(calm))
    assert (log / "model.safetensors").read_bytes() == (calm / "model.safetensors").read_bytes()
