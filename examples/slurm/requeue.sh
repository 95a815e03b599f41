#!/bin/bash
# A job that outlasts its time limit and preemption: it saves, goes back into the queue, and continues when it is
# started again. Two minutes before its time is up Slurm signals it; what happens later is added to the output.
#SBATCH --job-name=requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@120
set -euo pipefail
if [ -n "${VENV:-}" ]; then
    source "$VENV/bin/activate"
fi
# Since Slurm 22.05 srun does not take the CPUs per task from sbatch by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# A requeued job keeps its number, and each task of an array has one of its own.
srun --kill-on-bad-exit=1 python -m hvd_trainer.mnist \
    --backend ddp --log-dir "runs/$SLURM_JOB_ID" --requeue ${DATA_DIR:+--data-dir "$DATA_DIR"} "$@"
