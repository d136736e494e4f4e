"""SLURM jobs and the launcher. This folder stands alone: submitting needs no torch.

- `slurm` is the command: it fills the scripts (*.sbatch), submits them, and queues evaluations after a pretraining.
- `jobs` and `status` read what SLURM and the run folders say.
- On the nodes, `check_node` tests the devices, and `accelerate_launch` starts the processes, forwards signals and ends
  with one error.
"""
