"""The jobs for Kubernetes: pods follow its schema, files fit each other, and commands are those of the package."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import yaml
from launchers import REPOSITORY

from hvd_trainer.config.parser import parse
from hvd_trainer.jobs.options import MnistOptions
from hvd_trainer.rendezvous.endpoint import SECRET_FILE

FOLDER = REPOSITORY / "examples/kubernetes"
LATEST = kubernetes_validate.latest_version()


def read(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text()))


def mpi_job() -> tuple[dict[str, Any], dict[str, Any]]:
    job = read("mpijob-horovod.yaml")
    return job, job["spec"]["mpiReplicaSpecs"]


def pytorch_job() -> tuple[dict[str, Any], dict[str, Any]]:
    job = read("pytorchjob-ddp.yaml")
    return job, job["spec"]["pytorchReplicaSpecs"]


def test_pods_and_volume_follow_the_kubernetes_schema() -> None:
    kubernetes_validate.validate(read("volume.yaml"), LATEST, strict=True)
    for _, replicas in (mpi_job(), pytorch_job()):
        for replica in replicas.values():
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, **replica["template"]}
            kubernetes_validate.validate(pod, LATEST, strict=True)


def test_training_pods_fit_the_volume_and_the_image() -> None:
    for replicas in (mpi_job()[1], pytorch_job()[1]):
        pod = replicas["Worker"]["template"]["spec"]
        (claim,) = (v["persistentVolumeClaim"] for v in pod["volumes"] if "persistentVolumeClaim" in v)
        assert claim["claimName"] == read("volume.yaml")["metadata"]["name"]
        user = pod["securityContext"]["fsGroup"]
        assert f"ARG USER_ID={user}\n" in (REPOSITORY / "docker/Dockerfile").read_text()


def test_launchers_name_the_secret() -> None:
    """torchrun and horovodrun tell anybody who asks where a job's ranks meet."""
    containers = {
        f"{job['kind']}-{name}": replica["template"]["spec"]["containers"][0]
        for job, replicas in (mpi_job(), pytorch_job())
        for name, replica in replicas.items()
    }
    named = {
        name: {variable["name"]: variable["value"] for variable in container.get("env", [])}.get(SECRET_FILE)
        for name, container in containers.items()
        if "hvd_trainer.mnist" in container["args"]
    }
    starters = ("MPIJob-Launcher", "PyTorchJob-Master", "PyTorchJob-Worker")
    assert named == dict.fromkeys(starters, "/etc/hvd_trainer/secret")


def job_of(arguments: list[str]) -> MnistOptions:
    """Return the options that the job reads from a command line."""
    return parse(MnistOptions, arguments[arguments.index("hvd_trainer.mnist") + 1 :])


def test_mpi_job_starts_a_rank_per_slot() -> None:
    job, replicas = mpi_job()
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    words = container["args"]
    ranks = job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]
    assert words[: words.index("python")] == [
        *("horovodrun", "-np", str(ranks), "--hostfile", "/etc/mpi/hostfile", "-p", "2222")
    ]
    (worker,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert worker["readinessProbe"]["tcpSocket"]["port"] == 2222
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(job["spec"]["slotsPerWorker"])
    assert job_of(words).save.resume == "auto"


def test_pytorch_job_starts_a_rank_per_gpu() -> None:
    job, replicas = pytorch_job()
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch", "the operator looks for it by this name"
        assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
        options = job_of(container["args"])
        assert (options.engine.backend, options.save.resume) == ("ddp", "auto")
