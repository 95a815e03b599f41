#!/bin/bash
# Data parallelism in a container: 2 nodes of 4 GPUs, a rank and a copy of the model on each GPU, each in the image.
#SBATCH --job-name=container
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --gres=gpu:4
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail
# What a command in the image begins with. With Charliecloud, for instance: CONTAINER="ch-run $PWD/image --"
CONTAINER="${CONTAINER:-apptainer exec --nv ${IMAGE:-hvd_trainer.sif}}"
# Since Slurm 22.05 srun does not take the CPUs per task from sbatch by itself.
export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
# shellcheck disable=SC2086  # it is several words
srun --kill-on-bad-exit=1 $CONTAINER python -m hvd_trainer.mnist \
    --backend ddp ${DATA_DIR:+--data-dir "$DATA_DIR"} "$@"
