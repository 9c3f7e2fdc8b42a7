"""Rollouts in virtual time: the production classes over modelled engines and environments."""
