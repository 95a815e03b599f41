"""`compare`: how long a step should take by what other trials took."""

from __future__ import annotations

import pytest
from compared import trials_of

from hvd_trainer.tools.compare.prediction import Shape, explain, predict
from hvd_trainer.tools.compare.trials import Trial


def test_predict_staged_step_from_one_rank() -> None:
    """The example of the module: 100 ms, halved, and a fifth of it waiting."""
    trials = trials_of(ranks="1,2", stages="1,2", chunks="1,4", batch_size="32", schedule="gpipe")
    alone, cut = trials[0], trials[1]
    staged = trials[-1]
    assert Shape.of(staged) == Shape(replicas=1, parts=2, chunks=4, batch_size=32, bubble=0.2)
    for base in (alone, cut):
        found = predict(trials, {base.key: 0.1})[staged.key]
        assert found.base is base
        assert found.step_s == pytest.approx(0.0625)
    both = predict(trials, {alone.key: 0.1, cut.key: 0.12})[staged.key]
    assert both.base is cut  # whose chunks are as small


def test_predict_chooses_the_nearest_base() -> None:
    trials = trials_of(ranks="1,2,4", stages="1,2", chunks="1,2", batch_size="32,64", schedule="gpipe")

    def at(ranks: int, stages: int, chunks: int, batch: int = 32) -> Trial:
        wanted = {"ranks": ranks, "stages": stages, "chunks": chunks, "batch_size": batch}
        return next(t for t in trials if all(t.values[name] == str(value) for name, value in wanted.items()))

    def predicted(wanted: Trial, *measured: Trial) -> tuple[float, Trial] | None:
        found = predict(trials, {base.key: 1.0 + number for number, base in enumerate(measured)})
        return found.get(wanted.key)

    # As many replicas of the model exchange as many gradients.
    assert predicted(at(4, 2, 2), at(1, 1, 1), at(2, 1, 1)) == (pytest.approx(2 * 0.75), at(2, 1, 1))
    # More ranks do more at the same time.
    assert predicted(at(4, 1, 1), at(1, 1, 1)) == (1, at(1, 1, 1))
    # In a naive pipeline one stage works at a time.
    assert predicted(at(2, 2, 1), at(1, 1, 1)) == (pytest.approx(1), at(1, 1, 1))
    assert predicted(at(2, 2, 2), at(2, 2, 1)) == (pytest.approx(0.75), at(2, 2, 1))
    # Neither itself, nor another batch.
    assert predicted(at(1, 1, 1), at(1, 1, 1), at(1, 1, 1, 64)) is None
    assert predicted(at(2, 2, 2), at(1, 1, 1, 64)) is None


def test_predict_needs_a_base_of_the_same_engine_and_options() -> None:
    trials = trials_of(ranks="1,2", engines="ddp,horovod", precision="fp32,bf16", batch_size="32")
    ddp, horovod, ddp_bf16 = trials[:3]
    two = next(trial for trial in trials if trial.label == "ddp x 2, precision fp32")
    found = predict(trials, {ddp.key: 0.5, horovod.key: 0.3, ddp_bf16.key: 0.25})
    assert found[two.key] == (0.5, ddp)


def test_explain_splits_a_deviation() -> None:
    """Twice as long as predicted: waiting alone makes 0.8 / 0.5 of it."""
    trials = {trial.label: trial for trial in trials_of(ranks="1,4", stages="1,2", chunks="4", schedule="gpipe")}
    one, four = trials["ddp x 1, stages 1"], trials["ddp x 4, stages 2"]
    assert explain(four, one, 1.0, 0.5, 2) == [
        "stages waited, sent and received for 50% of it and not 20%: +60%; all else: +25%",
        "4 threads on 2 cores",
        "2 copies of the model work at once, and exchange gradients",
    ]
    assert explain(one, one, 1.0, None, None) == []
    trials = {trial.label: trial for trial in trials_of(ranks="1,4", stages="1,2")}
    one, four = trials["ddp x 1, stages 1"], trials["ddp x 4, stages 2"]
    assert explain(four, one, 1.0, None, None)[-1] == "chunks of 64 samples, one after the other"
