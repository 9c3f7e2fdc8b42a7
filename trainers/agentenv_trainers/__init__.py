"""Trainers that ship with agentenv: SAO and the objectives it is made of."""
