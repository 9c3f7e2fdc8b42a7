"""Evaluation: success rates with their intervals, and the command `agentenv eval` that finds them out."""

from agentenv.evaluation.rates import SuccessRate, by_family, success_rate, wilson_interval

__all__ = ["SuccessRate", "by_family", "success_rate", "wilson_interval"]
