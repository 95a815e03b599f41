#!/bin/bash
# Data parallelism: 2 nodes of 4 GPUs, a rank and a copy of the model on each GPU.
#SBATCH --job-name=data_parallel
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
if [ -n "${VENV:-}" ]; then
    source "$VENV/bin/activate"
fi
# Since Slurm 22.05 srun does not take the CPUs per task from sbatch by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
srun --kill-on-bad-exit=1 python -m hvd_trainer.mnist \
    --backend ddp ${DATA_DIR:+--data-dir "$DATA_DIR"} "$@"
