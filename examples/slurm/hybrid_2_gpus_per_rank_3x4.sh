#!/bin/bash
# Each copy of the model on 2 GPUs of one rank, and data parallelism: 3 nodes of 4 GPUs, 6 ranks.
#SBATCH --job-name=hybrid_2_gpus_per_rank_3x4
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=2
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
srun --kill-on-bad-exit=1 python -m hvd_trainer.imdb \
    --backend ddp --devices-per-rank 2 --chunks 4 \
    --preset reference --precision bf16 --batch-size 32 --warmup-epochs 1 \
    ${DATA_DIR:+--data-dir "$DATA_DIR"} "$@"
