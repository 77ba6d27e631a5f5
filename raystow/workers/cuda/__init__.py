"""Coding on NVIDIA GPUs: CUDA, Triton and nvCOMP stand in this folder and nowhere else."""
