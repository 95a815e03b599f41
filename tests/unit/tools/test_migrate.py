"""Test `migrate`: every rule on its own script, what is left, and what it says of files that it cannot migrate."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from migrate_cases import CASES, HEAD, IMPORTS
from requirements import requires

from hvd_trainer import cli
from hvd_trainer.errors import OptionError
from hvd_trainer.measure import formats
from hvd_trainer.measure.tool_folder import MARKER
from hvd_trainer.tools.migrate import cli as migrate_cli
from hvd_trainer.tools.migrate import prove, source
from hvd_trainer.tools.migrate.migration import Migrated, migrate
from hvd_trainer.tools.migrate.table import BY_NAME, TABLE, Rule


def training(options: str = "", call: str = "model(data)", *, before: str = "") -> str:
    """Return a script that trains a model.

    Args:
        options: of Horovod's optimizer.
        call: what the backward pass begins with.
        before: lines before the loop.
    """
    return f"""{HEAD}
model = Net()
optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), named_parameters=model.named_parameters(){options})
{before}for data in load():
    {call}.backward()
    optimizer.step()
"""


def line(text: str, said: str) -> tuple[str, str]:
    return f"{HEAD}{text}\n", said


ONE_OF_TWO = """
def build(args):
    model = Net()
    if not args.horovod:
        model = DataParallel(model)
    else:
        hvd.broadcast_parameters(model.state_dict())
        optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), named_parameters=model.named_parameters())
    model(1).backward()
"""
BY_ANOTHER_NAME = """

def run(net):
    net(1).backward()


def other():
    net = compile(model)
    run(net)
"""
ON_A_LINE = "on a line of its own"
LEFT = {
    "process sets": line("group = hvd.add_process_set([0, 1])", "dist.new_group(ranks)"),
    "of a process set": line("hvd.allreduce_(x, process_set=group)", "hvd.allreduce_"),
    "Adasum": (training(", op=hvd.Adasum"), "Adasum has no counterpart in DDP"),
    "Adasum by an option": (training(", op=hvd.Adasum if adasum else hvd.Average"), "the script says so now"),
    "elastic": line("@hvd.elastic.run\ndef train(state):\n    pass", "torchrun --max-restarts"),
    "elastic sampler": line(
        "sampler = hvd.elastic.ElasticSampler(data)\nsampler.record_batch(0, 8)", "hvd.elastic.ElasticSampler"
    ),
    "timelines": line("hvd.start_timeline('trace.json')", "torch.profiler"),
    "horovod.run": ("import horovod\n\nif __name__ == '__main__':\n    horovod.run(main, np=2)\n", "horovod.run"),
    "own compression": (training(", compression=TopK"), "its compression is not hvd.Compression.fp16 or bf16"),
    "changed API": (training(", topk=3"), "its options are not those of one exchange"),
    "dynamic names": line(
        "for name, value in metrics.items():\n    mean = hvd.allreduce(value, name=name)",
        "loop over sorted(...), without name=, and migrate again",
    ),
    "gradients through a collective": line(
        "class Net:\n    def forward(self, x):\n        x = hvd.allgather(x)\n        return head(x)",
        "send it with .detach(), and migrate again",
    ),
    "methods": (training(call="model.loss_of(data)"), "the training calls `model.loss_of`"),
    "unknown function": (
        training(call="loss_of(model, data)"),
        "`loss_of`, which is not followed, gets the DDP object",
    ),
    "no training": (training(call="loss"), "no training call of the model is seen"),
    "wrapped again": (training(before="model, optimizer = amp(model, optimizer)\n"), "`model` is assigned again"),
    "one of two models": (HEAD + ONE_OF_TWO, "another one on each side of the condition"),
    "trained by another name": (
        training(call="wrapped(data)", before="def use():\n    run(compile(model))\n\n") + BY_ANOTHER_NAME,
        "`compile`, which is not followed, gets the DDP object",
    ),
    "an optimizer of two models": line(
        "hvd.broadcast_parameters(one.state_dict())\nopt = SGD(chain(one.parameters(), two.parameters()))\n"
        "opt = hvd.DistributedOptimizer(opt)\none(1).backward()",
        "it is not seen which model it trains",
    ),
    "groups at the start": line("hvd.init(process_sets=[hvd.ProcessSet([0])])", "hvd.init"),
    "sum of unseen passes": (
        training(", op=hvd.Sum, backward_passes_per_step=2"),
        "Sum has no counterpart in DDP with passes",
    ),
    "unseen passes": (
        training(", backward_passes_per_step=2"),
        "it is not seen which pass before a step is the last",
    ),
    "a handle": line("handle = hvd.allreduce_async_(x)", "write it without _async and synchronize"),
    "in a comprehension": line("means = [hvd.allreduce(x) for x in values]", ON_A_LINE),
    "on a condition's line": line("if ready: x = hvd.allreduce(x)", ON_A_LINE),
    "on one line with others": line("x = 3; x = hvd.allreduce(x)", ON_A_LINE),
    "behind another call": line("x = order(), hvd.allreduce(x)", ON_A_LINE),
    "an average that is not known": line(
        "x = hvd.allreduce(x.detach(), average=args.mean)", "write op=hvd.Average or hvd.Sum"
    ),
    "factors": line(
        "x = hvd.allreduce(x, prescale_factor=0.5)",
        "write what prescale_factor does without it, and migrate again",
    ),
    "some ranks": line("x = hvd.allreduce(x, process_set=some)", "dist.new_group(ranks)"),
    "parameters in a variable": line(
        "hvd.broadcast_parameters(state, root_rank=0)", "write model.state_dict() into the call"
    ),
    "inside what is migrated": line("x = hvd.allreduce(torch.tensor(hvd.is_homogeneous()))", "hvd.is_homogeneous"),
    "splits": line("x, sizes = hvd.alltoall(x, splits)", "hvd.alltoall"),
    "frozen later": (
        training() + "for p in model.body.parameters():\n    p.requires_grad = False\n",
        "p.requires_grad: DDP waits for gradients of what had them",
    ),
    "unknown calls": line("print(hvd.start())", "torch.distributed has nothing of this name"),
    "a question of how it was built": line("assert hvd.mpi_threads_supported()", "take it out"),
    "a constant": line("op = hvd.Average if mean else hvd.Sum", "it belongs to a call that is left"),
    "hosts": (
        "horovodrun -np 4 -H node1:2,node2:2 python train.py\n",
        "on node2: torchrun --nnodes 2 --master-addr node1",
    ),
}


def one(text: str, name: str = "train.py") -> Migrated:
    (result,) = migrate({Path(name): text})
    return result


@pytest.mark.parametrize("name", CASES)
def test_rules_give_what_a_person_writes(name: str) -> None:
    case = CASES[name]
    result = one(case.before, case.name)
    assert case.shown(result.after) == case.after
    assert result.left == []
    assert one(result.after, case.name).after == result.after, "and a second time changes nothing"


@pytest.mark.parametrize("name", CASES)
def test_imports_are_those_of_what_is_used(name: str) -> None:
    after = one(CASES[name].before, CASES[name].name).after
    body = IMPORTS.sub("", after)
    for word in ("os", "contextlib", "dist", "default_hooks", "Join", "DDP", "hvd"):
        is_imported = re.search(rf"^(import|from) .*\b{word}$", after, re.MULTILINE)
        assert bool(is_imported) == bool(re.search(rf"\b{word}[.(]", body)), (word, after)


@pytest.mark.parametrize("rule", TABLE.rules, ids=lambda rule: rule.names)
def test_no_rule_can_be_missing(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[rule.test]
    for name in rule.names.split():
        monkeypatch.delitem(BY_NAME, name)
    assert [case.shown(it.after) for it in migrate({Path(case.name): case.before})] != [case.after]


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left_is_listed_and_runs_on_hvd_trainer(case: str) -> None:
    before, said = LEFT[case]
    result = one(before, "train.sh" if case == "hosts" else "train.py")
    assert any(said in f"{what}: {advice}" for _, what, advice in result.left), result.left
    for line, what, _ in result.left:
        word = what.removeprefix("hvd.").partition("=")[0].split(" ")[0]
        assert word in result.before.splitlines()[line - 1], "the line is that of the file"
    assert "horovod.torch" not in result.after, "nothing that is left needs Horovod's compiled part"


def test_an_elastic_training_is_left_whole() -> None:
    """Its ranks change; those of torch.distributed do not."""
    text = "hvd.init()\n\n\n@hvd.elastic.run\ndef train(state):\n    print(hvd.rank())\n    model(1).backward()\n"
    text += "# Horovod: wrap optimizer with DistributedOptimizer.\n"
    result = one(HEAD + text)
    assert result.after == HEAD.replace("import horovod.torch as hvd", "from hvd_trainer import hvd") + text
    assert [what for _, what, _ in result.left] == ["hvd.elastic.run"]


def test_weights_of_another_rank_are_sent_by_a_broadcast() -> None:
    """DDP sends those of rank 0."""
    sent = "model = Net()\nhvd.broadcast_parameters(model.state_dict(), root_rank=1)\n"
    result = one(training().replace("model = Net()\n", sent))
    assert "dist.broadcast(tensor.detach(), src=1)" in result.after
    assert result.after.index("src=1") < result.after.index("DDP(model")


def test_passes_whose_last_is_not_seen_are_left() -> None:
    """A step behind the loop takes gradients of passes that were none's last."""
    result = one(CASES["passes by number"].before + "optimizer.step()\n")
    assert "no_sync" not in result.after
    assert "hvd.DistributedOptimizer(" in result.after
    assert left_of(result) == ["hvd.DistributedOptimizer"]


def test_lines_with_more_than_a_call_keep_the_rest() -> None:
    text = CASES["synchronize"].before.replace("\noptimizer.sync", "\nif ready: say(); optimizer.sync")
    assert "if ready: say(); None\n" in one(text).after
    assert "if ready: dist.init_process_group()\n" in one(HEAD + "if ready: hvd.init()\n").after


def test_a_step_on_the_line_of_its_with_is_rewritten_alike() -> None:
    """It ended in a traceback."""
    before, below = CASES["synchronize"].before, "\n    scaler.step(optimizer)\n    scaler.update()\n"
    beside = "scaler.step(optimizer); scaler.update()\n"
    assert below in before
    after = one(before.replace(below, f" {beside}")).after
    assert after == one(before).after.replace("scaler.step(optimizer)\nscaler.update()\n", beside)


@pytest.mark.parametrize("case", ["world", "allreduce", "compression", "passes in a loop"])
def test_line_ends_stay_as_they_are(case: str) -> None:
    before = CASES[case].before
    assert one(before.replace("\n", "\r\n")).after == one(before).after.replace("\n", "\r\n")


def test_a_lone_part_of_a_training_keeps_its_waits() -> None:
    """The optimizer is made in a file that was not given."""
    text = "import horovod.torch as hvd\ndef train(optimizer):\n    optimizer.synchronize()\n"
    text += "    with optimizer.skip_synchronize():\n        optimizer.step()\n    print(hvd.rank())\n"
    assert one(text).after.count("synchronize") == 2


def test_what_is_left_starts_too() -> None:
    result = one(HEAD + "hvd.init()\nhvd.start_timeline('trace.json')\nprint(hvd.rank())\nhvd.shutdown()\n")
    assert "from hvd_trainer import hvd\n" in result.after
    assert "dist.init_process_group()\nhvd.init()\n" in result.after
    assert "print(dist.get_rank())\ndist.destroy_process_group()\nhvd.shutdown()\n" in result.after


def test_a_folder_is_migrated_together() -> None:
    """The model, and hvd itself, go from file to file."""
    main = "import horovod.torch as hvd\nfrom loop import train\nfrom log import say\n\nmodel = Net()\n"
    main += "optimizer = SGD(model.parameters())\n"
    main += "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
    main += "train(model, optimizer)\nsay(hvd, 'done')\n"
    loop = "def train(model, optimizer):\n    model(1).backward()\n    optimizer.step()\n"
    loop += "    save(model.state_dict())\n"
    loop += "    optimizer.synchronize()\n"
    log = "def say(hvd, text):\n    if hvd.rank() == 0:\n        print(text)\n"
    texts = {
        Path("main.py"): main,
        Path("loop.py"): loop,
        Path("log.py"): log,
        Path("other.py"): "def train(x): pass\n",
    }
    results = {it.path.stem: it for it in migrate(texts)}
    assert "train(model, optimizer)\nsay('done')" in results["main"].after
    assert results["loop"].after == loop.replace("model.state", "model.module.state").replace(
        "    optimizer.synchronize()\n", ""
    )
    assert "def say(text):\n    if dist.get_rank() == 0" in results["log"].after
    assert "import torch.distributed as dist\n" in results["log"].after
    assert results["other"].after == results["other"].before
    assert not any(it.left for it in results.values())


def test_names_that_are_taken_are_left_to_the_script() -> None:
    after = one(HEAD + "dist = 3\nprint(hvd.rank(), dist)\n").after
    assert "import torch.distributed as torch_dist\n" in after
    assert "print(torch_dist.get_rank(), dist)\n" in after
    apex = "from apex.parallel import DistributedDataParallel as DDP\n"
    after = one(apex + training()).after
    assert "from torch.nn.parallel import DistributedDataParallel as torch_DDP\n" in after
    assert "model = torch_DDP(model)\n" in after
    own = "import torch\nimport torch.distributed as dist\n"
    assert one(own + HEAD.partition("\n")[2] + "hvd.barrier()\n").after == own + "dist.barrier()\n"


MAIN = """
def setup():
    hvd.init()
    return {}


def train(model):
    optimizer = hvd.DistributedOptimizer(SGD(model.parameters()), named_parameters=model.named_parameters())
    model(1).backward()
"""
END = "dist.destroy_process_group()\n"


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        (MAIN + "\n\nif __name__ == '__main__':\n    setup()\n    train(Net())\n", "    "),
        (MAIN + "\n\nif __name__ == '__main__':\n    setup()\ntrain(Net())\n", ""),
        (MAIN + "\n\nsetup()\ntrain(Net())\n", ""),
        (MAIN + "\n\nif distributed:\n    setup()\ntrain(Net())\n", None),
        (MAIN, None),
        ("try:\n    hvd.init()\nexcept ImportError:\n    pass\ntrain(Net())\n", ""),
        ("if distributed:\n    hvd.init()\ntrain(Net())\n", None),
    ],
)
def test_the_process_group_ends_behind_the_training(text: str, ends: str | None) -> None:
    after = one(HEAD + text).after
    assert after.endswith(f"\n\n{ends}{END}") if ends is not None else END not in after


def test_what_outlives_its_function_keeps_the_process_group() -> None:
    """A function that returns the model, or a class that keeps it, is done before the training is."""
    case = CASES["model returned"].before.replace("    model = Net()", "    hvd.init()\n    model = Net()")
    assert one(case + "\n\nmain(args)\n").after.endswith(f"main(args)\n\n{END}")
    case = CASES["optimizer of a class"].before.replace(
        "        self.net =", "        hvd.init()\n        self.net ="
    )
    assert one(case + "\n\nJob(Net()).step(1)\n").after.endswith(f".step(1)\n\n{END}")


def test_a_module_of_others_does_not_end_the_process_group() -> None:
    texts = {Path("world.py"): HEAD + "hvd.init()\n", Path("train.py"): "import world\n"}
    assert END not in "".join(it.after for it in migrate(texts))


def test_horovods_launcher_needs_no_other_start() -> None:
    text = HEAD + "import horovod\n\nhvd.init()\nhorovod.run(main, np=2)\n"
    after = one(text).after
    assert "import horovod\n" in after
    assert "hvd" not in after


def test_what_is_beside_a_script_is_beside_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may read its settings and data there, and import its modules."""
    for name in ("conf/config.yaml", "data.txt", "nets/one.py", "nets/words.txt", ".git/HEAD", "runs/old.txt"):
        path = tmp_path / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept\n")
    script = tmp_path / "job/train.py"
    script.write_text(CASES["world"].before)
    monkeypatch.setattr(prove, "_parity", lambda *_: (0, None))
    (migrated,) = migrate({script: script.read_text()})
    assert prove.prove([migrated], script, [], 2, 1, tmp_path / "job/runs/migrate") == 0
    (new,) = (tmp_path / "job/runs").rglob("new")
    assert (new / "train.py").read_text() == CASES["world"].after
    names = {path.name for path in new.iterdir()} - {MARKER}
    assert names == {".git", "conf", "data.txt", "nets", "runs", "train.py"}
    assert [path.name for path in (new / "runs").iterdir()] == ["old.txt"]
    for name in ("conf/config.yaml", "nets/one.py", "nets/words.txt"):
        assert (new / name).read_text() == "kept\n"
    assert not (new / "nets").is_symlink(), "it imports what is beside it, which may be migrated"


@pytest.mark.parametrize(("step", "quantity"), [(0, "parameters"), (0, "optimizer"), (1, "loss")])
def test_a_step_before_the_training_is_behind_what_differs_first(
    step: int, quantity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp16 the moved weights are within what is allowed, until the first step."""
    script = tmp_path / "job/train.py"
    script.parent.mkdir()
    script.write_text(training() + "hvd.broadcast_optimizer_state(optimizer, 0)\n")
    monkeypatch.chdir(script.parent)
    findings = [{"step": step, "quantity": quantity}, {"step": 1, "quantity": "gradients"}]
    asked: list[list[str]] = []
    monkeypatch.setattr(
        prove, "_parity", lambda words, *_: (asked.append(words), (1, findings[len(asked) - 1]))[1]
    )
    (migrated,) = migrate({Path("train.py"): script.read_text()})
    assert prove.prove([migrated], script, [], 2, 1, tmp_path / "out") == 1
    first, _, rest = capsys.readouterr().out.partition("Without that trap of Horovod:")
    assert "Behind it:\ntrain.py:9: hvd.broadcast_optimizer_state(optimizer, 0)\n" in first
    assert "--no-exactly-horovod" in asked[1]
    assert "Behind that:\ntrain.py:5: optimizer = hvd.DistributedOptimizer(" in rest


# The command.


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(CASES["world"].before)
    return path


def test_the_command_prints_a_diff_and_writes_when_it_is_told_to(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # a machine without git
    beside = script.with_name("README.md")
    beside.write_text("    horovodrun -np 4 python train.py\n")
    assert cli.main(["migrate", str(script)]) == 0
    printed = capsys.readouterr().out
    assert "-thvd.barrier()\n" in printed
    assert "+dist.barrier()\n" in printed
    assert "+    torchrun --nproc-per-node 4 train.py" in printed
    assert script.read_text() == CASES["world"].before
    assert cli.main(["migrate", str(script), "--write"]) == 0
    assert script.read_text() == CASES["world"].after
    assert beside.read_text() == "    torchrun --nproc-per-node 4 train.py\n"
    assert capsys.readouterr().out.endswith(f"To start it, type: torchrun --nproc-per-node 3 {script}\n")


def test_files_of_a_folder_that_are_not_about_horovod_may_be_anything(script: Path) -> None:
    script.with_name("old.py").write_text("print 'Python 2'\n")
    with script.open("w", newline="") as file:
        file.write(CASES["world"].before.replace("\n", "\r\n"))
    assert migrate_cli.main([str(script.parent), "--write", "--force"]) == 0
    assert script.read_bytes() == CASES["world"].after.replace("\n", "\r\n").encode()


@requires("git")
def test_changes_that_git_does_not_have_are_not_overwritten(script: Path) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(script.parent), *words], check=True)

    git("init", "-q")
    git("add", ".")
    with pytest.raises(OptionError, match="has changes that git does not have. Commit them, or type --force"):
        migrate_cli.main([str(script), "--write"])
    assert script.read_text() == CASES["world"].before
    git("-c", "user.name=me", "-c", "user.email=me@here", "commit", "-qm", "begin")
    assert migrate_cli.main([str(script), "--write"]) == 0
    assert script.read_text() == CASES["world"].after
    script.write_text(CASES["world"].before)
    assert migrate_cli.main([str(script), "--write", "--force"]) == 0


def test_something_left_has_its_own_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(LEFT["timelines"][0])
    assert migrate_cli.main([str(path)]) == 3
    printed = capsys.readouterr().out
    assert f"{path}:3: hvd.start_timeline: record a trace by torch.profiler" in printed


def test_what_still_names_horovod_is_for_the_author_to_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        HEAD
        + "# Horovod: join the job.\nhvd.init()\nprint('Horovod begins')  # Horovod waits.\n"
        + "if args.horovod:  # code, and no sentence\n    pass\n"
    )
    assert migrate_cli.main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "+# Join the job." in printed
    assert f"still name Horovod:\n{path}:5: print('Horovod begins')  # Horovod waits.\n\n" in printed


def test_a_large_folder_shows_how_far_it_is_on_a_terminal(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(source.progress.keywords, "delay", 0)
    for name in ("one.py", "other.py"):
        script.with_name(name).write_text("import train\n")
    migrate_cli.main([str(script.parent)])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    migrate_cli.main([str(script.parent)])
    shown = capsys.readouterr().err
    assert re.search(r"parse: +0%.* 0/3 ", shown)
    assert re.search(r"rewrite: +0%.* 0/3 ", shown)


def test_the_last_lines_say_what_ddp_says_of_unused_parameters(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migrate_cli.main([str(script)]) == 0
    assert "leaves out parameters" not in capsys.readouterr().out
    script.write_text(training())
    assert migrate_cli.main([str(script)]) == 0
    assert "Then write DDP(model, find_unused_parameters=True)" in capsys.readouterr().out


def test_the_script_to_prove_is_one_that_trains(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.unlink()
    main = HEAD + "hvd.init()\nif __name__ == '__main__':\n    pass\n"
    script.with_name("a_module.py").write_text(HEAD + "hvd.init()\n")
    script.with_name("b_measures.py").write_text("import a_module\n" + main)
    script.with_name("c_trains.py").write_text("import a_module\n" + main + "loss.backward()\n")
    assert migrate_cli.main([str(script.parent)]) == 0
    assert f"migrate {script.with_name('c_trains.py')} --prove" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import horovod.torch as hvd\nprint 'old'\n", "is not Python 3: see line 2"),
        ("import horovod.tensorflow as hvd\n", "of Horovod's APIs only horovod.torch is migrated"),
        ("import horovod.tensorflow.keras as hvd\n", "of Horovod's APIs only horovod.torch is migrated"),
    ],
)
def test_mistakes_are_told_in_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(OptionError, match=said):
        migrate_cli.main([str(path)])


@pytest.mark.parametrize("words", [[], ["--prove", "."], ["train.py", "--prove", "--write"]])
def test_what_is_typed_must_name_a_script(words: list[str]) -> None:
    with pytest.raises(
        OptionError, match="Name files or folders, such as: python -m hvd_trainer migrate train.py"
    ):
        migrate_cli.main(words)


def test_libcst_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"Type: pip install .*\[migrate\]'"):
        migrate_cli.main(["train.py"])


def left_of(result: Migrated) -> list[str]:
    return [what for _, what, _ in result.left]


STANDS_IN = HEAD.replace("import horovod.torch as hvd", "from hvd_trainer import hvd")


def test_a_star_import_gives_what_stands_in_for_horovod() -> None:
    result = one("from horovod.torch import *\n\ninit()\n")
    assert result.after == "from hvd_trainer.hvd import *\n\ninit()\n"
    assert left_of(result) == ["hvd.*"]


@pytest.mark.parametrize("line", ["from .horovod import helper", "from . import horovod", "from .torch import *"])
def test_modules_of_a_package_are_not_horovod(line: str) -> None:
    text = f"{line}\nimport horovod.torch as hvd\nprint(hvd.rank())\n"
    assert f"{line}\n" in one(text).after


@pytest.mark.parametrize("call", ["getattr(hvd, 'rank')()", "setup(hvd, 3)", "setup(*rest, hvd=hvd)"])
def test_unknown_functions_get_what_stands_in_for_horovod(call: str) -> None:
    result = one(f"{HEAD}{call}\n")
    assert result.after == f"{STANDS_IN}{call}\n"
    assert left_of(result) == ["hvd"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model, *, hvd", "model"),
        ("model, *, hvd, text=''", "model, *, text=''"),
        ("model, *rest, hvd", "model, *rest"),
        ("hvd, /, model", "model"),
    ],
)
def test_parameters_that_stand_for_horovod_go(before: str, after: str) -> None:
    call = "train(hvd, 1)" if before.startswith("hvd") else "train(1, hvd=hvd)"
    text = HEAD + f"def train({before}):\n    return hvd.rank()\n\n\n{call}\n"
    assert f"def train({after}):\n    return dist.get_rank()\n\n\ntrain(1)\n" in one(text).after


@pytest.mark.parametrize(
    "text",
    [
        "import horovod.torch as hvd\n\n\ndef f(x, op=hvd.Average):\n    return op\n",
        "from horovod.torch import Average\n\n\ndef f(x, op=Average):\n    return op\n",
        "import horovod.torch as hvd\n\nhvd.timeout = 3\n",
    ],
)
def test_names_that_are_used_keep_their_import(text: str) -> None:
    result = one(text)
    stands_in = text.replace("import horovod.torch as hvd", "from hvd_trainer import hvd")
    assert result.after == stands_in.replace("horovod.torch", "hvd_trainer.hvd")
    assert result.left


def test_files_that_hand_horovod_on_keep_their_import() -> None:
    main = "import horovod.torch as hvd\nfrom mid import middle\n\nmiddle(hvd)\n"
    mid = "import horovod.torch as hvd\nfrom low import train\n\n\ndef work():\n    train(1, hvd)\n"
    handed = "from low import train\n\n\ndef middle(lib):\n    train(1, lib)\n"
    low = "def train(x, hvd):\n    print(hvd.rank(), hvd.is_homogeneous())\n"

    def migrated(mid: str, low: str) -> dict[str, str]:
        texts = {"low.py": low, "mid.py": mid, "main.py": main}
        return {it.path.stem: it.after for it in migrate({Path(name): text for name, text in texts.items()})}

    after = migrated(mid, low)
    assert after["mid"] == mid.replace("import horovod.torch as hvd", "from hvd_trainer import hvd")
    after = migrated(handed, low)
    assert "from hvd_trainer import hvd\n" in after["main"]
    assert "middle(hvd)\n" in after["main"]
    assert "def middle(lib):\n    train(1, lib)\n" in after["mid"]
    after = migrated(handed, low.replace(", hvd.is_homogeneous()", ""))
    assert "middle()\n" in after["main"]
    assert "def middle():\n    train(1)\n" in after["mid"]
    assert "def train(x):\n    print(dist.get_rank())\n" in after["low"]


def test_imports_inside_functions_are_not_those_of_the_file() -> None:
    inside = "def f():\n    import os\n\n    return os.name\n\n\n"
    assert one(f"{HEAD}{inside}print(hvd.local_rank())\n").after.count("import os\n") == 2
    tried = HEAD.replace("import torch\n", "import torch\n\ntry:\n    import os\nfinally:\n    pass\n")
    assert one(f"{tried}print(hvd.local_rank())\n").after.count("import os\n") == 1


@pytest.mark.parametrize(
    "wait", ["y = hvd.synchronize(h) if flag else x", "def wait():\n    return hvd.synchronize(h)"]
)
def test_an_exchange_whose_wait_is_left_is_left(wait: str) -> None:
    text = f"h = hvd.allreduce_async(x)\n{wait}\n"
    result = one(HEAD + text)
    assert result.after == STANDS_IN + text
    assert left_of(result) == ["hvd.allreduce_async", "hvd.synchronize"]


@pytest.mark.parametrize("rest", ["finally:\n    cleanup()\n", "except OSError:\n    cleanup()\n"])
def test_what_is_behind_an_empty_try_stays(rest: str) -> None:
    text = training() + "try:\n    optimizer.synchronize()\n" + rest
    assert "try:\n    pass\n" + rest in one(text).after


@pytest.mark.parametrize(("before", "after"), [("{}.bit_length()", "({}).bit_length()"), ("{}[0]", "({})[0]")])
def test_results_are_bracketed(before: str, after: str) -> None:
    nodes = 'dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])'
    assert after.format(nodes) + "\n" in one(HEAD + before.format("hvd.cross_size()") + "\n").after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("hvd.init(); seed()", "dist.init_process_group() or hvd.init(); seed()"),
        ("if ready: hvd.init()", "if ready: dist.init_process_group() or hvd.init()"),
        ("ready and hvd.init()", "ready and (dist.init_process_group() or hvd.init())"),
        ("hvd.shutdown(); say()", "dist.destroy_process_group() or hvd.shutdown(); say()"),
    ],
)
def test_what_is_left_starts_where_a_line_has_more(before: str, after: str) -> None:
    result = one(f"{HEAD}{before}\nhvd.start_timeline('trace.json')\n")
    assert f"{after}\n" in result.after
    assert "from hvd_trainer import hvd\n" in result.after
    assert left_of(result) == ["hvd.start_timeline"]


def test_proof_without_its_packages_is_refused_before_the_diff(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "NEEDED", ("scipy_of_nobody",))
    with pytest.raises(OptionError, match=r"need scipy_of_nobody, .* Type: pip install .*tools"):
        migrate_cli.main([str(script), "--prove"])
    assert capsys.readouterr().out == ""


# What is Horovod's outside of its API, and what is beside Python.

TOKENS = {
    "trainer = Trainer(strategy=HorovodStrategy())\n": "HorovodStrategy",
    "trainer = Trainer(strategy='horovod')\n": "horovod",
    "from sparkdl import HorovodRunner\n": "sparkdl",
    "rank = int(os.environ['HOROVOD_RANK'])\n": "HOROVOD_RANK",
    "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK', 0))\n": "OMPI_COMM_WORLD_RANK",
    "from mpi4py import MPI\n": "mpi4py",
    "backend = import_module('horovod.torch')\n": "horovod.torch",
    "subprocess.run(['horovodrun', '-np', '2', 'python', 'x.py'])\n": "horovodrun",
    "def train(hvd):\n    return hvd.rank()\n": "hvd",
    "import pkg.mod as m\nprint(m.hvd.rank())\n": "hvd",
    "setup(install_requires=['torch', 'horovod>=0.19'])\n": "horovod>=0.19",
}


@pytest.mark.parametrize("text", TOKENS)
def test_whatever_is_horovods_in_code_is_listed(text: str, tmp_path: Path) -> None:
    """Also in a file that does not import it."""
    rows = [(line, what) for line, what, _ in one(HEAD + "hvd.init()\n" + text).left]
    assert (4 + text.startswith("import pkg"), TOKENS[text]) in rows
    (tmp_path / "train.py").write_text(text)
    assert TOKENS[text] == "hvd" or migrate_cli.main([str(tmp_path)]) == 3


@pytest.mark.parametrize(
    "text",
    [
        "parser.add_argument('--horovod')\n",
        "use(args.hvd)\n",
        "def horovod(): pass\n",
        "'''Horovod: horovodrun.'''\n",
    ],
)
def test_names_and_sentences_of_the_author_are_not_horovods(text: str) -> None:
    assert one(HEAD + "hvd.init()\n" + text).left == []


COMMANDS = {
    "run.sh": (
        "mpirun -np 4 -H localhost:4 -bind-to none -map-by slot -x NCCL_DEBUG \\\n    -mca pml ob1 python -u "
        "train.py --lr 1\n",
        "torchrun --nproc-per-node 4 train.py --lr 1\n",
    ),
    "Makefile": (
        "train:\n\thorovodrun -np 2 ./start.sh 3\n",
        "train:\n\ttorchrun --no-python --nproc-per-node 2 ./start.sh 3\n",
    ),
    ".ci/test.yml": ("- run: horovodrun -np 2 python -m train\n", "- run: torchrun --nproc-per-node 2 -m train\n"),
    "requirements.txt": ("torch\nhorovod[pytorch]>=0.28\nnumpy\n", "torch\nnumpy\n"),
    "many.sh": (
        "horovodrun -np $n -H localhost:$n cmd/$task.py --lr 1\n",
        "torchrun --no-python --nproc-per-node $n cmd/$task.py --lr 1\n",
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_launch_lines_are_rewritten_where_they_are_certain(name: str, script: Path) -> None:
    beside = script.parent / name
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(COMMANDS[name][0])
    assert migrate_cli.main([str(script.parent), "--write", "--force"]) == 0
    assert beside.read_text() == COMMANDS[name][1]


LINES = {
    "deep/job.slurm": (
        "#SBATCH -N 2\nsrun -l python train.py\n",
        "2: srun: srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES",
    ),
    "Dockerfile": ("FROM horovod/horovod:0.28\n", "1: FROM horovod/horovod:0.28: an image of PyTorch"),
    "job.yaml": ("kind: MPIJob\n", "1: kind: MPIJob: kind: PyTorchJob"),
    "hosts.sh": ("\nhorovodrun -np 4 -H a:2,b:2 python train.py\n", "on b: torchrun --nnodes 2 --master-addr a"),
    "env.sh": ("export HOROVOD_TIMELINE=t.json\n", "1: HOROVOD_TIMELINE: record a trace by torch.profiler"),
    "build.sh": (
        "HOROVOD_WITH_PYTORCH=1 HOROVOD_CUDA_HOME=/cuda make\n",
        "1: HOROVOD_WITH_PYTORCH, HOROVOD_CUDA_HOME: nothing of PyTorch reads it",
    ),
    "Makefile": ("RUN=mpirun -np 2\nrun:\n\t${RUN} python other.py\n", "1: mpirun: torchrun --nproc-per-node N"),
    "notes.ipynb": ('{"source": ["import horovod.torch as hvd"]}', "a notebook: jupyter nbconvert"),
    "old.py": ("import horovod.torch as hvd\nprint 'old'\n", "2: old.py is not Python 3"),
    "keras.py": (
        "\nimport horovod.keras as hvd\n",
        "2: keras.py has horovod.keras: of Horovod's APIs only horovod.torch",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_what_is_not_certain_is_listed_with_what_to_type(
    name: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = script.parent / name
    beside.parent.mkdir(exist_ok=True)
    beside.write_text(LINES[name][0])
    assert migrate_cli.main([str(script.parent)]) == 3
    assert LINES[name][1] in capsys.readouterr().out


def test_commands_of_other_programs_stay(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beside = script.with_name("run.sh")
    beside.write_text("mpirun -np 4 ./solver\nmpirun -np 2 python other.py\nsrun python other.py\n")
    assert migrate_cli.main([str(script.parent), "--write", "--force"]) == 0
    assert beside.read_text().startswith("mpirun -np 4 ./solver\nmpirun -np 2 python other.py\n")


def test_a_check_changes_nothing_and_tells_whether_a_file_would_change(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert migrate_cli.main([str(script), "--check"]) == 1
    assert "\n1 file to change: add --write\n" in capsys.readouterr().out
    assert script.read_text() == CASES["world"].before
    assert migrate_cli.main([str(script), "--write", "--force"]) == 0
    capsys.readouterr()
    assert migrate_cli.main([str(script), "--check"]) == 0
    assert capsys.readouterr().out == "\n0 files to change\n"  # "add --write", where nothing would be written


@pytest.mark.parametrize("write", [False, True])
def test_programs_read_what_is_left_with_the_lines_of_the_file(
    write: bool, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(HEAD + "hvd.init()\nhvd.barrier()\nx = os.environ['HOROVOD_RANK']\n# Horovod\n")
    assert migrate_cli.main([str(script), "--json", "--force", *["--write"] * write]) == 3
    (fact,) = json.loads(capsys.readouterr().out)
    lines = script.read_text().splitlines()
    ((line, what, _),) = fact["left"]
    ((number, text),) = fact["named"]
    assert what == "HOROVOD_RANK"
    assert what in lines[line - 1]
    assert lines[number - 1] == text == "# Horovod"


def test_a_file_in_another_encoding_keeps_it(script: Path) -> None:
    text = "# -*- coding: latin-1 -*-\n" + CASES["world"].before + "# caf\xe9\n"
    script.write_bytes(text.encode("latin-1"))
    assert migrate_cli.main([str(script), "--write", "--force"]) == 0
    assert script.read_bytes().endswith(b"# caf\xe9\n")


def test_scripts_of_a_folder_start_and_end_on_their_own() -> None:
    """They share a module, and each starts Horovod once."""
    job = HEAD + "from world import say\n\nhvd.init()\nsay(hvd.rank())\n"
    texts = {Path("world.py"): "def say(text): pass\n", Path("a.py"): job, Path("b.py"): job}
    for result in migrate(texts)[1:]:
        assert "is_initialized" not in result.after
        assert result.after.endswith(END)


def test_horovod_by_another_files_import_is_followed() -> None:
    texts = {
        Path("world.py"): "import horovod.torch as hvd\n",
        Path("a.py"): "from world import hvd\n\nprint(hvd.rank())\n",
        Path("b.py"): "from world import *\n\nprint(hvd.size())\n",
        Path("c.py"): "from world import hvd\n\nhvd.start_timeline('t')\n",
        Path("d.py"): "import pkg.world as w\n\nprint(w.hvd.rank())\nw.hvd.start_timeline('t')\n",
    }
    after = {it.path.stem: it.after for it in migrate(texts)}
    assert after["a"] == "import torch.distributed as dist\n\nprint(dist.get_rank())\n"
    assert "print(dist.get_world_size())\n" in after["b"]
    assert after["c"] == "from hvd_trainer import hvd\n\nhvd.start_timeline('t')\n"
    assert after["d"].endswith("print(dist.get_rank())\nw.hvd.start_timeline('t')\n")
    assert after["world"] == "from hvd_trainer import hvd\n", "d has it from there"


LAUNCHERS = {
    "from sparkdl import HorovodRunner\n\nHorovodRunner(np=2).run(main, 3)\n": (
        "TorchDistributor(num_processes=2, local_mode=False, use_gpu=torch.cuda.is_available()).run(main, 3)\n",
        [],
    ),
    "from sparkdl import HorovodRunner\n\nHorovodRunner(np=count).run(main)\n": (
        "HorovodRunner(np=count).run(main)\n",
        ["HorovodRunner", "sparkdl", "HorovodRunner"],
    ),
    "import horovod.spark\n\nhorovod.spark.run(main, args=(1, 2), num_proc=n)\n": (
        "TorchDistributor(num_processes=n, local_mode=False, use_gpu=torch.cuda.is_available()).run(main, 1, 2)\n",
        [],
    ),
    "import horovod.spark\n\nresults = horovod.spark.run(main, num_proc=2)\n": (
        "results = horovod.spark.run(main, num_proc=2)\n",
        ["horovod.spark.run"],
    ),
    "from ray.train.horovod import HorovodTrainer\n\nHorovodTrainer(main, scaling_config=s).fit()\n": (
        "TorchTrainer(main, scaling_config=s).fit()\n",
        [],
    ),
    "from horovod.ray import RayExecutor\n\nRayExecutor(settings, num_workers=2).start()\n": (
        "RayExecutor(settings, num_workers=2).start()\n",
        ["horovod.ray.RayExecutor"],
    ),
}


@pytest.mark.parametrize("text", LAUNCHERS)
def test_launchers_of_spark_and_ray_are_those_of_pytorch(text: str) -> None:
    """tests/launchers/test_ray_and_spark.py runs them."""
    after, left = LAUNCHERS[text]
    result = one(text)
    assert result.after.endswith(after)
    assert left_of(result) == left
    assert bool(left) == ("import HorovodRunner" in result.after or "horovod" in result.after)
