"""The changes that close CVE-2024-10190 and its two siblings in Horovod's elastic mode, and its way into hosts.

    launcher (HTTP server)                           worker
      PUT worker_addresses: where I listen, my key <---- 1
      2 ----> ping, hosts updated   (signed with that key)
      3 <---- pong, ack             (signed with that key)

As published, all of it is pickle, which runs what the sender chose, and any host may send a PUT:
(1) the PUT itself; (2) a GET of the PUT's path hands out the key, which signs a pickle to the
worker; (3) a host that registered itself answers the launcher's ping with a signed pickle.
Here all three are JSON (messages.py) and the launcher keeps the key to itself.

horovodrun enters the other hosts by ssh, which as published took whatever key they answered with, also where
another one is known. A host that is new is taken as before, without a question.

Not covered: `horovod.run(function)` sends pickled functions and results through its HTTP server
by design; use it on a network that you trust.
"""

from __future__ import annotations

from hvd_trainer.horovod_build.source import Replacement

SECURITY_CHANGES = (
    Replacement(
        "horovod/runner/util/remote.py",
        "-o StrictHostKeyChecking=no'",
        "-o StrictHostKeyChecking=accept-new'",
        "a host that answers with another key than the known one may be another host",
    ),
    Replacement(
        "horovod/runner/elastic/rendezvous.py",
        "from horovod.runner.common.util import codec\n",
        "from horovod.runner.elastic import messages\n",
        "decode without pickle",
    ),
    Replacement(
        "horovod/runner/elastic/rendezvous.py",
        "                addresses, secret_key = codec.loads_base64(value)\n",
        "                addresses, secret_key = messages.decode_worker(value)\n",
        "decode without pickle",
    ),
    Replacement(
        "horovod/runner/elastic/rendezvous.py",
        "int(local_rank), addresses, secret_key)\n\n            super(",
        "int(local_rank), addresses, secret_key)\n                return\n\n            super(",
        "do not store the worker's key where a GET reads it",
    ),
    Replacement(
        "horovod/runner/http/http_server.py",
        "        self._put_value(scope, key, value)\n        self.send_status_code(OK)\n",
        "        try:\n"
        "            self._put_value(scope, key, value)\n"
        "        except ValueError as error:\n"
        "            logging.error('KVStore ERROR: refused %s: %s', self.path, error)\n"
        "            self.send_status_code(BAD_REQUEST)\n"
        "            return\n"
        "        self.send_status_code(OK)\n",
        "a malformed value is answered with 400 instead of a broken connection",
    ),
    Replacement(
        "horovod/runner/http/http_client.py",
        "def put_data_into_kvstore(addr, port, scope, key, value):\n",
        "def put_data_into_kvstore(addr, port, scope, key, value, encode=None):\n",
        "let a sender choose JSON",
    ),
    Replacement(
        "horovod/runner/http/http_client.py",
        "        req = Request(url, data=codec.dumps_base64(value, to_ascii=False))\n",
        "        data = encode(*value) if encode else codec.dumps_base64(value, to_ascii=False)\n"
        "        req = Request(url, data=data)\n",
        "let a sender choose JSON",
    ),
    Replacement(
        "horovod/runner/elastic/worker.py",
        "                                  value)\n",
        "                                  value,\n"
        "                                  encode=messages.encode_worker)\n",
        "send JSON",
    ),
    Replacement(
        "horovod/runner/elastic/worker.py",
        "from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES\n",
        "from horovod.runner.elastic import messages\n"
        "from horovod.runner.elastic.rendezvous import PUT_WORKER_ADDRESSES\n",
        "send JSON",
    ),
    Replacement(
        "horovod/runner/elastic/worker.py",
        "class WorkerNotificationManager(object):\n",
        "class NotificationWire(network.Wire):\n"
        '    """Signed like every message between Horovod\'s services, but JSON inside."""\n'
        "    KINDS = (network.PingRequest, network.PingResponse, network.AckResponse,\n"
        "             HostsUpdatedRequest)\n\n"
        "    def _dumps(self, obj):\n"
        "        return messages.encode_message(obj)\n\n"
        "    def _loads(self, message):\n"
        "        return messages.decode_message(message, self.KINDS)\n\n\n"
        "class WorkerNotificationManager(object):\n",
        "speak JSON between launcher and workers",
    ),
    Replacement(
        "horovod/runner/elastic/worker.py",
        "    NAME = 'worker notification service'\n",
        "    NAME = 'worker notification service'\n    WIRE = NotificationWire\n",
        "speak JSON between launcher and workers",
    ),
    Replacement(
        "horovod/runner/elastic/worker.py",
        "class WorkerNotificationClient(network.BasicClient):\n",
        "class WorkerNotificationClient(network.BasicClient):\n    WIRE = NotificationWire\n\n",
        "speak JSON between launcher and workers",
    ),
    Replacement(
        "horovod/runner/elastic/worker.py",
        "handle_hosts_updated(req.timestamp, req.res)\n",
        "handle_hosts_updated(req.timestamp, HostUpdateResult(req.res))\n",
        "JSON carries the flag as its number",
    ),
    Replacement(
        "horovod/runner/common/util/network.py",
        "        message = cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)\n",
        "        message = self._dumps(obj)\n",
        "let a service choose JSON",
    ),
    Replacement(
        "horovod/runner/common/util/network.py",
        "        return cloudpickle.loads(message)\n",
        "        return self._loads(message)\n\n"
        "    def _dumps(self, obj):\n"
        "        return cloudpickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL)\n\n"
        "    def _loads(self, message):\n"
        "        return cloudpickle.loads(message)\n",
        "let a service choose JSON",
    ),
    Replacement(
        "horovod/runner/common/util/network.py",
        "class BasicService(object):\n    def __init__(self, service_name, key, nics):\n"
        "        self._service_name = service_name\n        self._wire = Wire(key)\n",
        "class BasicService(object):\n    WIRE = Wire\n\n"
        "    def __init__(self, service_name, key, nics):\n"
        "        self._service_name = service_name\n        self._wire = self.WIRE(key)\n",
        "let a service choose JSON",
    ),
    Replacement(
        "horovod/runner/common/util/network.py",
        "class BasicClient(object):\n    def __init__(",
        "class BasicClient(object):\n    WIRE = Wire\n\n    def __init__(",
        "let a client choose JSON",
    ),
    Replacement(
        "horovod/runner/common/util/network.py",
        "        self._verbose = verbose\n        self._service_name = service_name\n"
        "        self._wire = Wire(key)\n",
        "        self._verbose = verbose\n        self._service_name = service_name\n"
        "        self._wire = self.WIRE(key)\n",
        "let a client choose JSON",
    ),
)
