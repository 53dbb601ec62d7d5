"""Reinforcement learning of diffusion models: numbers, prompts, rewards and models; knows no Dask."""
