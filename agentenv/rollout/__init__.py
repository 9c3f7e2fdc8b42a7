"""Rollouts: from tasks and engines to batches of trajectories."""
