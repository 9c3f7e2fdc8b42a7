"""Sandboxes in which an agent's commands run."""
