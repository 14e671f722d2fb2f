#!/bin/bash
# Two nodes of eight GPUs: sbatch launchers/slurm.sh, from the root of the repository.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00

export MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / 8))

srun torchrun --nnodes "$SLURM_NNODES" --nproc_per_node 8 \
  --rdzv_backend c10d --rdzv_endpoint "$MASTER:29500" --rdzv_id "$SLURM_JOB_ID" \
  recipes/run_glue.py recipes/configs/sst2.yaml --resume_from_checkpoint last
