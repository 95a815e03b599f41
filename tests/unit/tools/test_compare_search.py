"""`compare --search`: races, searches on made-up machines, and their report."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from compared import RAN

from hvd_trainer import OptionError
from hvd_trainer.tools.compare.race import Race
from hvd_trainer.tools.compare.search import AS_IT_IS, Search, SearchResult, Speed
from hvd_trainer.tools.compare.search_job import SearchJob
from hvd_trainer.tools.compare.search_report import conclude, line_of, verdict, write_settings
from hvd_trainer.tools.compare.settings import as_words, describe, find_changes

FACTS = {
    "device": "cpu",
    "cores": 4,
    "threads": 2,
    "workers": 1,
    "world_size": 2,
    "in_memory": False,
    "has_own_loader": False,
    "bucket_mb": 25.0,
    "compression": "none",
    "parameters": 10_000_000,
}
ON_TRAINER = {"on_trainer": True, "reads_options": True}

# What can be changed.


def labels(group: Any, backend: str = "ddp", settings: Mapping[str, Any] | None = None, **facts: Any) -> list[str]:
    return [describe(its) for its in find_changes(group, backend, FACTS | facts, settings or {}, ())]


def test_changes_of_a_script_are_options_of_run() -> None:
    """Loaders and compression are its own; what lies underneath it is tuned."""
    facts = {"device": "cpu", "threads": 1, "cores": 2, "parameters": 30_000_000}
    hvd, ddp = {**facts, "uses_hvd": True}, {**facts, "uses_hvd": False}
    assert [describe(its) for its in find_changes("threads", "ddp", ddp, {}, ())] == ["--threads 2"]
    labels = {describe(its) for its in find_changes("exchange", "horovod", hvd, {}, ())}
    assert {"--fusion-threshold-mb 25", "--cycle-time-ms 5"} <= labels
    labels = {describe(its) for its in find_changes("exchange", "ddp", ddp, {}, ())}
    assert "--bucket-mb 64" in labels
    assert not any("cycle" in its for its in labels)
    job = SearchJob(("train.py", "--lr", "0.1"), 2)
    line = line_of(job, "ddp", SearchResult({"threads": 2, "bucket_mb": 64}), Path())
    assert line.endswith("run --np 2 --backend ddp --threads=2 --bucket-mb=64 -- train.py --lr 0.1")


def test_find_changes_leaves_out_equal_settings() -> None:
    assert labels("threads") == ["--threads 1", "--threads 4"]
    assert labels("threads", device="NVIDIA H200") == []
    assert labels("data") == ["--workers 0", "--workers 2", "--workers 4", "--prefetch 4", "--prefetch 8"]
    assert labels("data", workers=0) == ["--workers 1", "--workers 2", "--workers 4"]
    # 38 MB of gradients: buckets of 64 and of 128 MB are one bucket.
    buckets = [label for label in labels("exchange") if label.startswith("--bucket-mb")]
    assert buckets == ["--bucket-mb 1", "--bucket-mb 4", "--bucket-mb 12", "--bucket-mb 64"]
    assert labels("exchange", parameters=20_000) == []
    assert labels("compression") == ["--compression fp16", "--compression bf16", "--compression powersgd"]
    assert labels("compression", "horovod") == ["--compression fp16", "--compression bf16"]


def test_options_of_the_job_are_not_changed(tmp_path: Path) -> None:
    assert {name for change in find_changes("data", "horovod", FACTS, {}, {"workers"}) for name in change} == {
        "prefetch"
    }
    own = tmp_path / "own.yaml"
    own.write_text("workers: 2\n")
    words = ("job.py", "--bucket-mb=4", "--no_sync_batch_norm", "--lr", "-1", "--config", str(own))
    job = SearchJob(words, 2, ON_TRAINER)
    assert job.fixed == {"bucket_mb", "sync_batch_norm", "lr", "workers", "config"}


# Races.


def hold(race: Race, speeds: Mapping[str, float], noise: float, rng: random.Random) -> int:
    """Runs a race to its end; how many runs it took, beside those of the present settings."""
    count = 0
    while not race.is_over:
        running = race.running
        count += len(running)
        race.note(rng.lognormvariate(0, noise), {n: speeds[n] * rng.lognormvariate(0, noise) for n in running})
    return count


def test_race_finds_the_fastest_and_drops_slow_ones_early() -> None:
    speeds = {"slow": 0.5, "same": 1.0, "good": 1.2, "best": 1.5}
    race = Race(list(speeds), 0.02, 10)
    runs = hold(race, speeds, 0.01, random.Random(1))
    assert race.winner == "best"
    assert race.standing("slow").rounds == 2
    assert race.held < 5
    assert runs < 12


def test_race_among_equals_has_no_winner() -> None:
    """Race eight equal candidates 300 times: at the 95 % of the intervals about 8 races may have a winner by
    chance.
    """
    rng = random.Random(2)
    names = [str(number) for number in range(8)]
    won = 0
    for _ in range(300):
        race = Race(names, 0.0, 5)
        hold(race, dict.fromkeys(names, 1.0), 0.05, rng)
        won += race.winner is not None
    # Judged after each of up to four rounds: more often than once per race.
    assert won <= 300 * 0.05


def test_race_drops_a_candidate_that_does_not_run() -> None:
    race = Race(["a", "b"], 0.02, 4, [[0.0, 0.003] * 6])
    race.note(1.0, {"a": None, "b": 1.5})
    assert race.running == ["b"]
    race.note(1.0, {"b": 1.5})
    assert (race.winner, race.is_over) == ("b", True)


# Searches, on machines that are made up.


def search(
    measure: Any, fixed: Any = (), *, rounds: int = 3, least_gain: float = 0.02, lossy: bool = False, **facts: Any
) -> SearchResult:
    settings: dict[str, Any] = {"rounds": rounds, "least_gain": least_gain, "lossy": lossy}

    def run(label: str, settings: Mapping[str, Any]) -> Speed | None:
        speed = measure(label, settings)
        return None if speed is None else Speed(speed, 0.0)

    return Search("ddp", FACTS | facts, fixed, run, **settings).run()


def searched(
    effects: Mapping[str, float], noise: float = 0.01, seed: int = 0, lossy: bool = False, **facts: Any
) -> tuple[SearchResult, list[str]]:
    """A search where each option as it is typed has an effect on the speed; and the runs that it made."""
    rng, ran = random.Random(seed), []

    def measure(label: str, settings: Mapping[str, Any]) -> float | None:
        ran.append(label)
        speed = 1000 * rng.lognormvariate(0, noise)
        names = [WITHOUT_WORDS.get(word, word.replace("=", " ")) for word in as_words(settings)]
        for name in names:
            speed *= effects.get(name, 1.0)
        return speed or None

    return search(measure, rounds=5, lossy=lossy, **facts), ran


WITHOUT_WORDS = {"--leave-out=exchange": "without the exchange", "--leave-out=data": "without fetching data"}
BOUNDS = {"without the exchange": 1.5, "without fetching data": 1.3}


def test_search_combines_gains() -> None:
    helps = {"--threads 1": 1.1, "--workers 2": 1.1, "--bucket-mb 4": 1.2, "--bucket-mb 1": 1.1}
    found, ran = searched(BOUNDS | helps)
    assert found.settings == {"threads": 1, "workers": 2, "bucket_mb": 4}
    assert found.gain is not None
    assert found.gain.value == pytest.approx(1.1 * 1.1 * 1.2, rel=0.03)
    assert len(ran) < 100
    assert {its.label for its in found.tried if its.adopted} == {"--threads 1", "--workers 2", "--bucket-mb 4"}


def test_search_skips_groups_that_cannot_gain() -> None:
    found, ran = searched({"--threads 1": 0.8, "--threads 4": 0.9})
    assert set(found.untried) == {"exchange", "compression", "data"}
    assert found.settings == {}
    assert set(ran) == {AS_IT_IS, "without the exchange", "without fetching data", "--threads 1", "--threads 4"}
    assert len(ran) <= 24
    assert verdict("ddp", found).text == "ddp: nothing is faster than the job as it is, for certain."


def test_search_ignores_noise_of_much_shorter_steps() -> None:
    """Repeat a real search, where twice the speed was lost in the noise of the job without its slow disk."""
    speeds = {
        AS_IT_IS: iter([223, 225, 221, 223, 217, 217, 221, 219, 222]),
        "without fetching data": iter([5064, 724, 1161]),
        "--workers 2": iter([428, 481, 447]),
        "before": iter([220, 221, 219]),
        "tuned": iter([440, 450, 460]),
    }
    found = search(
        lambda label, settings: next(speeds[label]) if label in speeds else None,
        {"threads", "prefetch"},
        least_gain=0.3,
        world_size=1,
        cores=2,
    )
    assert found.settings == {"workers": 2}
    assert found.noise < 0.1


def test_search_learns_noise_from_an_undecided_bound() -> None:
    """With nothing else to race: once two runs differed by infinitely much."""
    speeds = {AS_IT_IS: iter([100.0, 100.0, 100.0]), "without the exchange": iter([96.0, 107.0, 97.0])}
    found = search(lambda label, settings: next(speeds[label]), in_memory=True, device="a GPU")
    assert "exchange" in found.untried
    assert 0.03 < found.noise < 0.1


def test_search_on_one_rank_skips_the_exchange() -> None:
    found, ran = searched({"without fetching data": 1.4, "--workers 4": 1.3}, world_size=1)
    assert found.settings == {"workers": 4}
    assert "without the exchange" not in ran


@pytest.mark.parametrize(
    ("fact", "why"),
    [("in_memory", "all of it is in memory"), ("has_own_loader", "it comes from a loader of its own")],
)
def test_search_leaves_loader_processes_alone_where_they_are_not_used(fact: str, why: str) -> None:
    found, ran = searched({"--workers 4": 1.3}, **{fact: True})
    assert found.untried["data"] == why
    assert "--workers 4" not in ran


def test_search_tries_compression_only_if_lossy() -> None:
    helps = BOUNDS | {"--compression bf16": 1.25}
    found, ran = searched(helps)
    assert not any("--compression" in label for label in ran)
    assert "--lossy" in found.untried["compression"]
    lossy, _ = searched(helps, lossy=True)
    assert lossy.settings == {"compression": "bf16"}


def test_search_seldom_takes_noise_for_a_gain() -> None:
    """Where nothing helps and runs differ by 7 %, the proof drops most of what a race has let through."""
    tuned = sum(bool(searched(BOUNDS, 0.05, seed)[0].settings) for seed in range(100))
    assert tuned <= 5


def test_search_pairs_runs_of_one_go_only() -> None:
    """A search that was stopped between the runs of a round goes on on a machine that is half as fast by then."""
    speeds = iter([Speed(1000.0, 0.0), *[Speed(500.0, 1.0)] * 99])
    facts = FACTS | {"in_memory": True, "world_size": 1}
    search_ = Search("ddp", facts, (), lambda label, settings: next(speeds), 3, 0.02, lossy=False)
    tried = {change.label: change.standing for change in search_.run().tried}
    assert {standing.speed for standing in tried.values()} == {1.0}


def test_search_passes_over_settings_that_do_not_run() -> None:
    """Also where a job cannot do without its exchange, as with --shard full: nothing is known of its cost then."""
    found, _ = searched(
        {"without the exchange": 0, "without fetching data": 1.3, "--bucket-mb 4": 1.2, "--bucket-mb 1": 0}
    )
    assert found.settings == {"bucket_mb": 4}
    assert "exchange" not in found.untried
    (broken,) = [its for its in found.tried if its.label == "--bucket-mb 1"]
    assert broken.standing.rounds == 0


def test_search_stops_when_adopted_settings_fail() -> None:
    speeds = iter([1000.0, 1500.0, 1500.0, None])
    with pytest.raises(OptionError, match="with settings that it has run with before"):
        search(lambda label, settings: next(speeds), in_memory=True)


def test_settings_keep_the_options_of_the_jobs_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("lr: 0.1\nbackend: horovod\n")
    result, _ = searched(BOUNDS | {"--bucket-mb 4": 1.2})
    job = SearchJob(("job.py", "--config", str(tmp_path / "own.yaml")), 2, ON_TRAINER)
    (file,) = write_settings({"ddp": result}, job, tmp_path, {"cores": 2}, "compare -- job.py")
    text = file.read_text()
    assert yaml.safe_load(text) == {"lr": 0.1, "backend": "ddp", "bucket_mb": 4}
    assert text.startswith("# Found by: compare -- job.py\n# On: cores 2\n")
    assert "# ddp: --bucket-mb 4 makes the job 1.2" in text
    assert "# It adds in another order" in text


def test_line_to_type_starts_the_engine_that_was_measured(tmp_path: Path) -> None:
    """An engine that is typed won over the one of the file, MPI was to be started by horovodrun, and a word behind
    an option that is replaced was lost.
    """
    result = SearchResult({"threads": 2})
    job = SearchJob(("job.py", "--backend", "horovod", "data", "--transport=mpi"), 2, ON_TRAINER)
    assert line_of(job, "ddp", result, tmp_path) == (
        f"torchrun --nproc-per-node 2 job.py --backend ddp data --transport=mpi --config {tmp_path}/ddp.yaml"
    )
    line = line_of(job, "horovod", result, tmp_path)
    assert line.startswith("mpirun -np 2 python job.py --backend horovod data --transport=mpi --config ")


# The job, and its report.


def test_unreadable_config_of_the_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("- a list\n")
    with pytest.raises(OptionError, match="should hold lines such as"):
        assert SearchJob(("job.py", "--config", str(tmp_path / "own.yaml")), 2, ON_TRAINER).own
    with pytest.raises(OptionError, match="cannot be read"):
        assert SearchJob(("job.py", f"--config={tmp_path}/none.yaml"), 2, ON_TRAINER).own


def test_settings_of_a_job_that_reads_no_options_go_into_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was to be started with --config, which it does not take; its own --config is none of the Trainer's."""
    helps, _ = searched(BOUNDS | {"--bucket-mb 4": 1.2, "--threads 1": 1.1})
    work = ON_TRAINER | {"reads_options": False}
    job = SearchJob(("train.py", "--config", "none.yaml", "--threads", "9"), 2, work)
    assert (job.fixed, job.own) == (set(), {})
    publish({"ddp": helps}, job, tmp_path)
    said = capsys.readouterr().out
    assert "Type: TrainerOptions(engine=EngineOptions(backend='ddp', threads=1, bucket_mb=4))" in said
    assert "ddp.yaml" not in said
    assert not (tmp_path / "ddp.yaml").exists()


def publish(results: Mapping[str, SearchResult], job: SearchJob, folder: Path) -> None:
    files = write_settings(results, job, folder, {}, "")
    known: dict[str, Any] = {"machine": {"cores": 2}, "warnings": ["busy"], "ran": RAN}
    report = conclude(results, job, folder, **known)
    report.show()
    report.write(folder, "search", files)


def test_report_of_a_search_has_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the terminal, the page, Markdown and JSON: the verdict, what to type, and the warnings."""
    helps, _ = searched(BOUNDS | {"--bucket-mb 4": 1.2})
    nothing, _ = searched({})
    job = SearchJob(("-m", "hvd_trainer.mnist", "--lr", "0.1"), 2, ON_TRAINER)
    publish({"horovod": nothing, "ddp": helps}, job, tmp_path)
    out = capsys.readouterr().out
    texts = [out, *((tmp_path / f"search.{kind}").read_text() for kind in ("json", "md", "html"))]
    line = "torchrun --nproc-per-node 2 -m hvd_trainer.mnist --lr 0.1 --config "
    for text in texts:
        assert "ddp: --bucket-mb 4 makes the job 1.2" in text
        assert "horovod: nothing is faster than the job as it is, for certain." in text
        assert f"{line}{tmp_path}/ddp.yaml" in text
        assert "busy" in text
    assert "98.8 %" in out, "of the four candidates' exchange"
    assert json.loads(texts[1])["backends"]["ddp"]["settings"] == {"bucket_mb": 4}
    assert yaml.safe_load((tmp_path / "ddp.yaml").read_text()) == {"backend": "ddp", "bucket_mb": 4}
